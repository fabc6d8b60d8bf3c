"""What ZeRO-3 needs besides DeepSpeed's own: leaf modules, and a guard over the order in which modules run."""
