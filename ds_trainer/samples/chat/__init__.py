"""Conversations and other records as token ids and labels: chat templates, and which tokens are trained on."""
