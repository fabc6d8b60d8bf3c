"""Additions to DeepSpeed's ZeRO-3: MoE leaf modules, and a guard over the order in which modules run."""
