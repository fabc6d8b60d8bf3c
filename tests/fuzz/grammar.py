"""Bad input for every reader: valid texts with mistakes in them, made by hypothesis."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from ds_trainer.checkpoint.protocol.file_records import FileRecord
from ds_trainer.checkpoint.protocol.manifest import Manifest
from ds_trainer.samples.prepared.block_file import BlockFileRecord
from ds_trainer.samples.prepared.manifest import DatasetManifest, ShardRecord

ODD = [
    *(
        "",
        " ",
        "\n",
        "\t",
        "\r\n",
        "\0",
        "\x1b[2J",
        "\u202e",
        "\ud800",
        "\ufeff",
        "é",
        "٣",
        "😀",
        "\\",
        "'",
        '"',
        "#",
        "%",
    ),
    *("-1", "0", "1", "1e999", "nan", ".inf", "9" * 5000, "1_000", "0x10", "true", "null", "~", "~nosuchuser", "auto"),
    *("/dev/zero", "/dev/null", "/", ".", "..", "a" * 5000, "${HOME}", "$(id)", "`id`", "<SECRET>", "fifo", "loop"),
]
_YAML = [
    *(
        "{",
        "}",
        "[",
        "]",
        ":",
        ": ",
        "- ",
        "-",
        ",",
        "&a ",
        "*a",
        "!!int ",
        "!!python/object:os.system ",
        "|",
        ">",
        "---",
    ),
    *("? ", "<<: *a", "[" * 300, "model:", "data:", "arguments:", "task:", "report:", "\n  ", "\n    "),
]
_JSON = [
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    "//",
    "/*",
    "[" * 3000,
    '{"a":' * 300,
    "\\u0000",
    "\\ud800",
    '"zero_optimization"',
]
RECIPES = [
    "model:\n  path: gpt2\ndata:\n  train: x.jsonl\n  sequence_length: 64\narguments:\n  max_steps: 2\n  output_dir: o",
    "model: {architecture: {model_type: llama, hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2}}\n"
    "task: {name: sft}\ndata: {train: [{path: x.jsonl, weight: 0.5}], eval: y.jsonl, max_length: 32}\n"
    "arguments: {learning_rate: 1e-3, deepspeed: {zero_optimization: {stage: 2}}, bf16: auto}\n",
    "a: &a [1, 2]\nb: *a\nreport: {sample_prompt: 'x'}\ndistillation: {teacher: t}\n",
]
DEEPSPEED = [
    json.dumps(
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": "auto"}}
    ),
    json.dumps(
        {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}}, "gradient_clipping": 1.0}
    ),
    json.dumps({"fp16": {"enabled": True, "loss_scale": 0, "min_loss_scale": 1}, "train_batch_size": 8, "aio": {}}),
    '{\n  # a comment\n  zero_optimization: {stage: 1}\n  "scheduler": {"type": "WarmupLR", "params": {}}\n}',
]
HOSTFILES = ["node1 slots=4\nnode2 slots=4\n", "user@10.0.0.1 slots=8 # first\n\n::1 slots=2 max_slots=4\nnode1:2\n"]
NODE_LISTS = ["gpu[007-009,12],login", "a[1-2]b[3-4]", "node1,node2", "r[01-04]n[1-8]-ib"]
RECORDS = [
    '{"text": "a"}\n{"text": "b"}\n',
    '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n',
    '{"prompt": "a", "completion": "b"}\n[]\n{"conversations": [{"from": "human", "value": "x"}]}\n',
    'prompt,completion\n"a","b"\nc,d\n',
    '[{"instruction": "a", "input": "", "output": "b", "tools": "[]"}]',
]
TEMPLATES = [
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}",
    "{%- if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% generation %}{{ m['content'] | trim }}"
    "{% endgeneration %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}",
]
_JINJA = [
    *(
        "{{",
        "}}",
        "{%",
        "%}",
        "{% for i in range(10**10) %}",
        "{{ 'a' * 10**10 }}",
        "{% set x = [1] * 10**9 %}",
        "{{ 9**9**9 }}",
    ),
    *(
        "{% endfor %}",
        "{% if %}",
        "messages",
        "|",
        "tojson",
        "{{ raise_exception('no') }}",
        "{{ ''.__class__ }}",
        "{{ x.y.z }}",
    ),
]


@st.composite
def mistaken(draw: st.DrawFn, valid: Sequence[str], words: Sequence[str] = ()) -> str:
    """A valid text after up to four changes."""
    text = draw(st.sampled_from(list(valid)))
    # Changes: where (of 1000), how many characters go, and what comes.
    word = st.one_of(st.sampled_from([*words, *ODD]), st.text(max_size=4))
    for place, gone, new in draw(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 12), word), max_size=4)):
        at = place * len(text) // 1000
        text = text[:at] + new + text[at + gone :]
    return text


def as_bytes(text: str) -> bytes:
    """``text`` as it may stand in a file: halves of surrogate pairs are bytes that are not UTF-8."""
    return text.encode("utf-8", errors="surrogatepass")


recipes = mistaken(RECIPES, _YAML)
deepspeed_files = mistaken(DEEPSPEED, _JSON)
hostfiles = mistaken(HOSTFILES, [" slots=", ":", "@", "[", "^", ";", ",", "٣"])
node_lists = mistaken(NODE_LISTS, ["[", "]", "-", ",", "[1-999999999]", "[1-9999]" * 3, "^", ";"])
records = st.tuples(
    st.sampled_from(["given.jsonl", "given.json", "given.csv", "given.txt"]),
    mistaken(RECORDS, [*_JSON, '"role"', '"content"', "{}", "[]", "null,"]),
)
templates = mistaken(TEMPLATES, _JINJA)
_FACTS: dict[str, Any] = {"arguments": "0" * 64, "written": 1.0, "versions": {"torch": "2"}}
_SIZES = st.integers(0, 2**62)


def _checkpoint(step: int, size: int, name: str) -> Manifest:
    return Manifest(step, 1, "a", {"world_size": 1}, 0, "fp32", files={name: FileRecord(name, size, 0)}, **_FACTS)


def _dataset(samples: int, size: int, name: str) -> DatasetManifest:
    counts, shards = {"samples": samples, name: 1}, (ShardRecord(0, samples, size, False, size, 0),)
    files = BlockFileRecord(4, 0), BlockFileRecord(8, 0)
    return DatasetManifest("0" * 64, {"a": 1}, "uint16", 1, counts, *files, shards)


_NAMES = st.text(st.characters(codec="utf-8"))
manifests: st.SearchStrategy[tuple[Any, str]] = st.one_of(
    *(
        st.builds(build, _SIZES, _SIZES, _NAMES).map(lambda one: (type(one), one.to_json()))
        for build in (_checkpoint, _dataset)
    ),
    st.tuples(st.just(Manifest), mistaken([_checkpoint(4, 1, "a").to_json()], _JSON)),
    st.tuples(st.just(DatasetManifest), mistaken([_dataset(1, 2, "a").to_json()], _JSON)),
)
_FORMS = ["{}", "[1, 2]", "accelerator.json"]
ARGUMENTS = {
    "accelerator_config": '{"even_batches": true}',
    "lr_scheduler_kwargs": '{"num_cycles": 1}',
    "gradient_checkpointing_kwargs": '{"use_reentrant": false}',
    "optim_args": "weight_decay=0.1",
}
arguments = st.one_of(*(st.tuples(st.just(name), mistaken([text, *_FORMS], _JSON)) for name, text in ARGUMENTS.items()))

SLURM = ["SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_TASKS_PER_NODE", "SLURM_GPUS_ON_NODE", "SLURM_NTASKS_PER_NODE"]
RANKS = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_PROCID",
    "SLURM_NTASKS",
]
environments = st.dictionaries(
    st.sampled_from(
        [*SLURM, *RANKS, "SLURM_STEP_ID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_JOB_ID"]
    ),
    st.one_of(
        node_lists,
        st.sampled_from([*(one for one in ODD if "\0" not in one), "2(x3),1", "a100:8(S:0-1)", "127.0.0.1", "29500"]),
    ),
    max_size=8,
)

# Commands that read and print; those that train, start jobs or measure the machine are left out.
COMMANDS = [
    *(["config"], ["config", "r.yaml"], ["data", "show", "r.yaml"], ["plan", "config.json"], ["plan", "r.yaml"]),
    *(
        ["report", "run"],
        ["plot", "run"],
        ["checkpoint", "inspect", "run"],
        ["checkpoint", "verify", "run"],
        ["arguments"],
    ),
    *(["support"], ["launch", "--dry-run", "s.py"], ["launch", "--slurm", "--nproc-per-node", "2", "s.py"], ["init"]),
    *(
        ["checkpoint", "export", "run", "--to", "x"],
        ["checkpoint", "convert", "run", "--to", "x"],
        ["train"],
        ["chat", "run"],
    ),
]
_OPTIONS = [
    *(
        "--world-size",
        "--device",
        "--explain",
        "--zero_stage",
        "--deepspeed",
        "--learning_rate",
        "--output_dir",
        "--nodes",
    ),
    *(
        "--devices-per-node",
        "--device-file",
        "--seq-len",
        "--global-batch",
        "--price",
        "--hostfile",
        "--node-rank",
        "--env",
    ),
    *(
        "--job-name",
        "--partition",
        "--sbatch-arg",
        "--time",
        "--launcher",
        "--master-addr",
        "--arguments.max_steps",
        "--data",
    ),
    *(
        "--samples",
        "--model",
        "--host-memory",
        "--margin",
        "--nvme-bandwidth",
        "--max-shard-size",
        "--dtype",
        "--unknown",
    ),
]
_WORDS = [
    "r.yaml",
    "s.py",
    "ds.json",
    "hosts",
    "run",
    "fifo",
    "loop",
    "2",
    "cpu",
    "1e-3",
    "KEY=x\ny",
    "a\nb",
    "x=y",
    "{",
    "[1,2",
]
command_lines = st.builds(
    lambda command, rest: [*command, *(word.replace("\0", "") for word in rest)],
    st.sampled_from(COMMANDS),
    st.lists(st.sampled_from([*_OPTIONS, *_WORDS, *ODD]), max_size=5),
).filter(lambda words: words[0] not in ("train", "chat", "init") or len(words) > 1)
