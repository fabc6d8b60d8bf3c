"""Shared utilities that do not depend on training: errors, logging, files, seeds, ranks, the rendezvous store."""
