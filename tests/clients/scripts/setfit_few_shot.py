"""SetFit: few-shot classification, first the embeddings, then the head."""

import argparse
import json
import sys

import transformers
from assets import sentences
from datasets import Dataset
from sentence_embeddings import embedding_model
from setfit import SetFitModel, Trainer, TrainingArguments
from sklearn.linear_model import LogisticRegression


def accuracy(predicted, wanted) -> dict[str, float]:
    """The share of right classes."""
    return {"accuracy": sum(int(a) == int(b) for a, b in zip(predicted, wanted, strict=True)) / len(wanted)}


def main() -> None:
    """Train and evaluate."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--max_steps", type=int, default=6)
    options = parser.parse_args()
    lines = sentences(48)
    data = Dataset.from_dict({"text": lines, "label": [int("(" in line) for line in lines]})
    args = TrainingArguments(
        output_dir=options.output_dir,
        batch_size=4,
        max_steps=options.max_steps,
        logging_steps=1,
        body_learning_rate=1e-3,
        report_to="none",
        use_amp=False,
    )
    model = SetFitModel(model_body=embedding_model(), model_head=LogisticRegression())
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data.select(range(16)),
        eval_dataset=data.select(range(16, 48)),
        metric=accuracy,
    )
    trainer.train()
    history = [
        {
            name: value
            for name, value in entry.items()
            if name in ("embedding_loss", "grad_norm", "learning_rate", "step")
        }
        for entry in trainer.st_trainer.state.log_history
    ]
    found = {
        "history": history,
        "trainer": transformers.Trainer.__module__.split(".")[0],
        "evaluation": trainer.evaluate(),
    }
    sys.stdout.write(f"found {json.dumps(found)}\n")


if __name__ == "__main__":
    main()
