"""sentence-transformers: an embedding model with two datasets, a loss for each, and an evaluator."""

import tempfile

from assets import bert_config, preferences, report, seeded, tokenizer
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.losses import CosineSimilarityLoss, MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer
from transformers import BertModel, HfArgumentParser


def embedding_model() -> SentenceTransformer:
    """Mean of the last hidden states of a small BERT."""
    with tempfile.TemporaryDirectory() as folder:
        seeded(BertModel, bert_config()).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        transformer = Transformer(folder)
    return SentenceTransformer(modules=[transformer, Pooling(transformer.get_word_embedding_dimension())])


def main() -> None:
    """Train, evaluate and save."""
    model = embedding_model()
    (args,) = HfArgumentParser(SentenceTransformerTrainingArguments).parse_args_into_dataclasses()
    pairs = preferences()
    triples = Dataset.from_dict({"anchor": pairs["prompt"], "positive": pairs["chosen"], "negative": pairs["rejected"]})
    scored = Dataset.from_dict(
        {"sentence1": pairs["prompt"], "sentence2": pairs["chosen"], "score": [n % 5 / 4 for n in range(len(pairs))]}
    )
    evaluator = EmbeddingSimilarityEvaluator(
        scored["sentence1"][80:], scored["sentence2"][80:], scored["score"][80:], name="held-out", write_csv=False
    )
    trainer = SentenceTransformerTrainer(
        model=model,
        args=args,
        train_dataset={"triples": triples.select(range(80)), "scored": scored.select(range(80))},
        eval_dataset={"triples": triples.select(range(80, 96)), "scored": scored.select(range(80, 96))},
        loss={"triples": MultipleNegativesRankingLoss(model), "scored": CosineSimilarityLoss(model)},
        evaluator=evaluator,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    report(trainer, evaluation=trainer.evaluate(), encoded=model.encode(["a b c"])[0].tolist())


if __name__ == "__main__":
    main()
