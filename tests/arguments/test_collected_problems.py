"""Construction and completion of arguments report all problems together."""

from __future__ import annotations

import pytest

from ds_trainer.arguments.seq2seq_training_arguments import Seq2SeqTrainingArguments
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.utils.errors import ConfigError, Problems


def test_unknown_names_and_wrong_values_are_one_error() -> None:
    with pytest.raises(ConfigError) as error:
        TrainingArguments("out", learning_rte=1e-3, fsdp="full_shard", past_index=2, seed=-1)  # type: ignore[call-arg]
    names = [problem.partition("=")[0].split()[0] for problem in error.value.problems]
    assert names == ["past_index", "learning_rte", "seed", "fsdp"]


def test_a_collector_gets_the_problems_and_nothing_is_raised_or_completed() -> None:
    args = TrainingArguments("out")
    args.seed, args.optim, args.report_to = -1, "adamv", "tensorboard"
    problems = Problems(["model: found before."])
    args.complete(problems)
    first, *others = problems
    assert first == "model: found before."
    assert [problem.partition("=")[0] for problem in others] == ["optim", "seed"]
    assert args.report_to == "tensorboard"  # not completed

    args.seed, args.optim = 1, "sgd"
    problems = Problems()
    args.complete(problems)
    assert not problems
    assert args.report_to == ["tensorboard"]


def test_arguments_of_subclasses_are_completed_only_without_problems() -> None:
    args = Seq2SeqTrainingArguments("out")
    args.generation_config, args.seed = '{"num_beams": 2}', -1
    problems = Problems()
    args.complete(problems)
    assert len(problems) == 1 and args.generation_config == '{"num_beams": 2}'
    args.seed = 1
    args.complete()
    assert args.generation_config == {"num_beams": 2}
