"""The scripts of this folder with their arguments, and the layouts in which they run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Client:
    """A script and its arguments."""

    script: str
    arguments: tuple[str, ...] = ()
    has_common: bool = True
    """Whether it takes the arguments of ``TrainingArguments``."""
    depends_on_ranks: bool = False
    """Whether its losses depend on the samples of a rank: negatives in the batch, means over tokens, random numbers."""
    undefined: tuple[str, ...] = ()
    """Ends of the names of numbers that compare two equal values, so that rounding decides."""


@dataclass(frozen=True)
class Layout:
    """A number of ranks and the values of ``--set`` that use them."""

    ranks: int
    settings: tuple[str, ...] = ()
    replicas: int = 1
    """How many ranks read different samples."""


_WHOLE = ("per_device_train_batch_size=4", "per_device_eval_batch_size=16")
LAYOUTS = {
    "1 rank": Layout(1),
    "ZeRO 2": Layout(2, ("zero_stage=2",), 2),
    "ZeRO 3": Layout(2, ("zero_stage=3",), 2),
    "SP 2": Layout(2, ("sequence_parallel_size=2", *_WHOLE)),
    "TP 2": Layout(2, ("tensor_parallel_size=2", *_WHOLE)),
}

_TASKS = ("--do_train", "--do_eval")
_ALL_TASKS = (*_TASKS, "--do_predict")
_PLAIN = ("--gradient_checkpointing", "False")
_GENERATION = ("--num_generations", "4", "--max_completion_length", "12", "--temperature", "1.0")
_PREFERENCES = "trl_preferences.py"
_GRPO = (*_GENERATION, "--eval_strategy", "no")

TRANSFORMERS = {
    "causal language modeling": Client("causal_language_modeling.py", _TASKS),
    "masked language modeling": Client("masked_language_modeling.py", (*_TASKS, "--masking", "static")),
    "text classification": Client("text_classification.py", _ALL_TASKS),
    "token classification": Client("token_classification.py", _ALL_TASKS),
    "question answering": Client("question_answering.py", _ALL_TASKS),
    "summarization, label smoothing": Client(
        "summarization.py", (*_ALL_TASKS, "--predict_with_generate", "--label_smoothing_factor", "0.1")
    ),
    "translation, beams": Client("translation.py", (*_ALL_TASKS, "--predict_with_generate", "--num_beams", "2")),
}
PEFT = {
    "LoRA": Client("peft_tuning.py", (*_TASKS, "--method", "lora")),
    "prompt tuning": Client("peft_tuning.py", (*_TASKS, "--method", "prompt")),
}
TRL = {
    "TRL SFT": Client("trl_sft.py", _PLAIN),
    "TRL SFT, accumulation": Client("trl_sft.py", ("--gradient_accumulation_steps", "2")),
    "TRL SFT, LoRA": Client("trl_sft.py", ("--method", "lora", *_PLAIN)),
    "TRL SFT, packing": Client("trl_sft.py", ("--method", "packing")),
    "TRL SFT, answers only": Client("trl_sft.py", ("--method", "completion")),
    # At the first step the model is the reference model.
    "TRL DPO": Client(_PREFERENCES, ("--kind", "DPO"), undefined=(": step 1 rewards/accuracies",)),
    "TRL DPO, LoRA": Client(
        _PREFERENCES, ("--kind", "DPO", "--method", "lora"), undefined=(": step 1 rewards/accuracies",)
    ),
    "TRL reward": Client(_PREFERENCES, ("--kind", "Reward")),
    "TRL KTO": Client(_PREFERENCES, ("--kind", "KTO"), depends_on_ranks=True),
    "TRL ORPO": Client(_PREFERENCES, ("--kind", "ORPO"), depends_on_ranks=True),
    "TRL CPO": Client(_PREFERENCES, ("--kind", "CPO"), depends_on_ranks=True),
    "TRL GRPO": Client("trl_grpo.py", _GRPO, depends_on_ranks=True),
    "TRL GRPO, accumulation": Client(
        "trl_grpo.py", (*_GRPO, "--gradient_accumulation_steps", "2", "--num_iterations", "2"), depends_on_ranks=True
    ),
}
SENTENCES = {
    "sentence-transformers": Client("sentence_embeddings.py", depends_on_ranks=True),
    "sentence-transformers, cross-encoder": Client("cross_encoder.py"),
    "SetFit": Client("setfit_few_shot.py", has_common=False, depends_on_ranks=True),
}
CLIENTS = TRANSFORMERS | PEFT | TRL | SENTENCES
