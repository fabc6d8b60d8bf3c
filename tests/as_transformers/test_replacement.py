"""``import ds_trainer.as_transformers``: what code that is imported before and afterwards gets from transformers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ds_trainer
from ds_trainer.arguments.overrides import read_overrides
from ds_trainer.utils import replaced_transformers

ROOT = Path(ds_trainer.__file__).parents[1]
IMPORT = "import ds_trainer.as_transformers\n"


def python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter with this code."""
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment = clean | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(cwd)])}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, env=environment, check=False, timeout=300
    )


def output(code: str, cwd: Path) -> list[str]:
    done = python(code, cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.extended
def test_every_name_exists_in_transformers_and_is_replaced_everywhere(tmp_path: Path) -> None:
    """First with the original modules, then with the hook; after a use of a name that is not replaced, too."""
    listing = (
        "from importlib import import_module\n"
        "from ds_trainer.compatibility.replacement import REPLACED\n"
        "import transformers\n"
        "def show():\n"
        "    for module, names in REPLACED.items():\n"
        "        for name in names:\n"
        "            print(module, name, getattr(import_module(module), name).__module__.split('.')[0])\n"
        "            if name in dir(transformers):\n"
        "                print('transformers', name, getattr(transformers, name).__module__.split('.')[0])\n"
    )
    before = output(listing + "show()", tmp_path)
    again = "show()\nimport transformers.trainer\nprint(transformers.trainer.TRAINER_STATE_NAME)\nshow()"
    after = output(IMPORT + listing + again, tmp_path)
    assert {line.split()[2] for line in before} == {"transformers"}
    replaced = [line.rsplit(" ", 1)[0] + " ds_trainer" for line in before]
    assert after == [*replaced, "trainer_state.json", *replaced]
    assert "transformers Trainer ds_trainer" in after


def test_importing_it_is_quick_and_imports_neither_transformers_nor_torch(tmp_path: Path) -> None:
    code = (
        "import sys, time\nbegan = time.process_time()\n" + IMPORT + "print(time.process_time() - began)\n"
        "print([name for name in ('torch', 'transformers', 'deepspeed') if name in sys.modules])"
    )
    runs = [output(code, tmp_path) for _ in range(3)]
    assert {loaded for _, loaded in runs} == {"[]"}
    assert min(float(seconds) for seconds, _ in runs) < 0.3


def test_the_source_of_transformers_trainer_is_not_executed(tmp_path: Path) -> None:
    code = IMPORT + (
        "import sys\nfrom transformers import Trainer, TrainingArguments, Seq2SeqTrainer\n"
        "module = sys.modules['transformers.trainer']\n"
        "print(Trainer.__module__, hasattr(module, '__path__'), 'TRAINER_STATE_NAME' in vars(module))"
    )
    assert output(code, tmp_path) == ["ds_trainer.training.trainer False False"]


@pytest.mark.extended
def test_a_subclass_defined_afterwards_is_a_subclass_of_ours(tmp_path: Path) -> None:
    (tmp_path / "library.py").write_text(
        "from transformers import Trainer\nimport transformers.trainer_callback as callbacks\n"
        "class LibraryTrainer(Trainer):\n    pass\n"
        "class LibraryCallback(callbacks.TrainerCallback):\n    pass\n",
        encoding="utf-8",
    )
    code = IMPORT + (
        "import library, ds_trainer\nprint(issubclass(library.LibraryTrainer, ds_trainer.Trainer))\n"
        "print(issubclass(library.LibraryCallback, ds_trainer.TrainerCallback))\n"
        "from transformers.integrations import TensorBoardCallback\n"
        "print(issubclass(TensorBoardCallback, ds_trainer.TrainerCallback))"
    )
    assert output(code, tmp_path) == ["True", "True", "True"]


@pytest.mark.extended
def test_a_module_imported_before_gets_ours(tmp_path: Path) -> None:
    (tmp_path / "library.py").write_text(
        "from transformers import Trainer, TrainingArguments as Arguments, TrainerCallback\n"
        "class Before(TrainerCallback):\n    pass\n"
        "def make(folder):\n    return Trainer, Arguments(output_dir=folder)\n",
        encoding="utf-8",
    )
    code = (
        "import library, transformers, sys\nfrom transformers import Trainer\n" + IMPORT + "import ds_trainer\n"
        "made, args = library.make('out')\n"
        "print(made is Trainer is transformers.Trainer is transformers.trainer.Trainer is ds_trainer.Trainer)\n"
        "print(type(args) is ds_trainer.TrainingArguments is transformers.training_args.TrainingArguments)\n"
        "import transformers.trainer_seq2seq\n"
        "print(transformers.trainer_seq2seq.Seq2SeqTrainer is ds_trainer.Seq2SeqTrainer)"
    )
    assert output(code, tmp_path) == ["True", "True", "True"]


@pytest.mark.extended
def test_a_class_that_subclassed_before_is_refused_and_nothing_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "library.py").write_text(
        "from transformers import Trainer, TrainingArguments\nclass LibraryTrainer(Trainer):\n    pass\n"
        "class LibraryArguments(TrainingArguments):\n    pass\n",
        encoding="utf-8",
    )
    code = (
        "import library, transformers\ntry:\n    "
        + IMPORT
        + (
            "except ValueError as error:\n    print(error)\n"
            "print(library.Trainer.__module__, transformers.TrainingArguments.__module__)"
        )
    )
    printed = output(code, tmp_path)
    assert printed[0] == "2 problems:"
    assert "library.LibraryTrainer is a subclass of transformers' Trainer, because its module" in printed[1]
    assert "library.LibraryArguments is a subclass of transformers' TrainingArguments" in printed[2]
    assert "Make `import ds_trainer.as_transformers` the first import" in printed[1]
    assert printed[3] == "transformers.trainer transformers.training_args"


# Instead of the others: the same test for ds_trainer.cli.main, which imports this module
@pytest.mark.cases("ds_trainer.cli.main")
@pytest.mark.extended
@pytest.mark.parametrize("module", ["ds_trainer", "ds_trainer.training.trainer", "ds_trainer.cli.main"])
def test_without_it_nothing_of_transformers_is_changed(module: str, tmp_path: Path) -> None:
    code = (
        f"import sys\nfinders = list(sys.meta_path)\nimport {module}, transformers\n"
        "print([type(finder) for finder in sys.meta_path if 'ds_trainer' in type(finder).__module__])\n"
        "print(transformers.Trainer.__module__, transformers.TrainingArguments.__module__)"
    )
    assert output(code, tmp_path) == ["[]", "transformers.trainer transformers.training_args"]


def test_one_line_on_the_main_process(tmp_path: Path) -> None:
    again = "from ds_trainer.compatibility.replacement import replace_transformers\nreplace_transformers()"
    done = python(IMPORT + again, tmp_path)
    lines = done.stderr.splitlines()
    assert len(lines) == 1
    version = f"ds-trainer: this process uses ds_trainer {ds_trainer.__version__} in place of transformers' Trainer, "
    assert lines[0].startswith(version)
    assert len(lines[0]) < 150
    other = "import os\nos.environ.update(RANK='1', WORLD_SIZE='2', LOCAL_RANK='1')\n"
    assert python(other + IMPORT, tmp_path).stderr == ""


def test_reading_set_starts_no_process_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where classes are replaced already: libraries write files on rank 0 alone once there is a group."""
    started: list[object] = []
    monkeypatch.setattr(replaced_transformers, "_join", started.append)
    assert read_overrides(["zero_stage=2"], ds_trainer.TrainingArguments) == {"zero_stage": 2}
    assert started == []
    args = ds_trainer.TrainingArguments(str(tmp_path), use_cpu=True)
    assert started == [args]
