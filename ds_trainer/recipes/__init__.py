"""Recipes in YAML, and the jobs that they describe: data, model, training, report."""
