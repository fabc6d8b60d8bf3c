"""Summarization with T5 and label smoothing: Seq2SeqTrainer, metrics of generated texts, a file of predictions."""

from assets import sentences, t5_config, tokenizer
from datasets import Dataset
from sequence_to_sequence import generate_and_train
from transformers import T5ForConditionalGeneration


def articles(number: int) -> Dataset:
    """Three lines each, with the first as summary."""
    lines = sentences(3 * number)
    return Dataset.from_dict(
        {"source": [" ".join(lines[3 * n : 3 * n + 3]) for n in range(number)], "target": lines[::3]}
    )


if __name__ == "__main__":
    generate_and_train(T5ForConditionalGeneration, t5_config(), tokenizer(), articles(64), prefix="summarize: ")
