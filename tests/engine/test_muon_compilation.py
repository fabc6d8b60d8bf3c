"""Muon's kernels are compiled when they are called, and not by every start."""

from __future__ import annotations

import json
import subprocess
import sys

_PROGRAM = """
import importlib, json, sys, torch
compiled = []
def recording(function, *given, **keywords):
    compiled.append(function.__name__)
    return function  # compiling takes minutes and a C++ compiler
torch.compile = recording
from deepspeed.runtime.zero.muon import original_muon
by_import = sorted(compiled)
gradient = torch.arange(12.0).reshape(3, 4)
plain = original_muon.muon_update(gradient.clone(), torch.zeros(3, 4))

for name in ("original_muon", "muon_optimizer"):
    sys.modules.pop("deepspeed.runtime.zero.muon." + name, None)
compiled.clear()
from ds_trainer.engine.muon_compilation import compile_muon_when_called
compile_muon_when_called()
from deepspeed.runtime.zero.muon import muon_optimizer
original_muon = sys.modules["deepspeed.runtime.zero.muon.original_muon"]
before = list(compiled)
update = muon_optimizer.muon_update(gradient.clone(), torch.zeros(3, 4))
again = original_muon.muon_update(gradient.clone(), torch.zeros(3, 4))
deferred = [name for name, value in vars(original_muon).items() if hasattr(value, "__wrapped__")]
print("RESULT " + json.dumps([by_import, before, sorted(compiled), plain.tolist(), update.tolist(), again.tolist(),
    [name for name in deferred if name in by_import]]))
"""


def test_the_first_call_compiles_all_kernels_and_gives_the_same_update() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    result = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))[7:])
    by_import, before, compiled, plain, update, again, deferred = result
    assert len(by_import) >= 3  # DeepSpeed compiles them when it is imported
    assert before == []
    assert compiled == by_import  # each once
    assert update == again == plain
    assert deferred == []  # in the module, kernels find each other, not the functions that defer them
