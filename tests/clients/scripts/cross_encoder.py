"""sentence-transformers: a cross-encoder that scores pairs."""

import tempfile

from assets import bert_config, preferences, report, seeded, tokenizer
from datasets import Dataset
from sentence_transformers.cross_encoder import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from transformers import BertForSequenceClassification, HfArgumentParser


def main() -> None:
    """Train, evaluate and save."""
    with tempfile.TemporaryDirectory() as folder:
        seeded(BertForSequenceClassification, bert_config(num_labels=1)).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        model = CrossEncoder(folder, num_labels=1)
    (args,) = HfArgumentParser(CrossEncoderTrainingArguments).parse_args_into_dataclasses()
    pairs = preferences()
    data = Dataset.from_dict(
        {"query": pairs["prompt"], "answer": pairs["chosen"], "label": [float(n % 2) for n in range(len(pairs))]}
    )
    trainer = CrossEncoderTrainer(
        model=model,
        args=args,
        train_dataset=data.select(range(80)),
        eval_dataset=data.select(range(80, 96)),
        loss=BinaryCrossEntropyLoss(model),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    report(trainer, evaluation=trainer.evaluate())


if __name__ == "__main__":
    main()
