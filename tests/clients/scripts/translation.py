"""Translation with BART and beams: Seq2SeqTrainer, metrics of generated texts, a file of predictions."""

from assets import bart_config, sentences, tokenizer
from datasets import Dataset
from sequence_to_sequence import generate_and_train
from transformers import BartForConditionalGeneration


def pairs(number: int) -> Dataset:
    """A line, and the line in capital letters."""
    lines = sentences(number)
    return Dataset.from_dict({"source": lines, "target": [line.upper() for line in lines]})


if __name__ == "__main__":
    generate_and_train(BartForConditionalGeneration, bart_config(), tokenizer(), pairs(64))
