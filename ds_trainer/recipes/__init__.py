"""The built-in language-model job: recipe, corpus, tokenizers, model, training, report."""
