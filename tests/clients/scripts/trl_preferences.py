"""Preferences and rewards with TRL; --kind: CPO, DPO, KTO, ORPO or Reward; --method: plain or lora, for DPO."""

import importlib
import sys
from dataclasses import dataclass, field

import trl
from assets import llama_config, preferences, report, seeded, tokenizer
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaForCausalLM, LlamaForSequenceClassification


@dataclass
class ScriptArguments:
    """What is trained."""

    kind: str = field(metadata={"help": "CPO, DPO, KTO, ORPO or Reward"})
    method: str = field(default="plain", metadata={"help": "plain or lora"})


def labeled() -> Dataset:
    """A prompt, a completion, and whether it is a good one."""
    pairs = preferences(48)
    rows = [
        {"prompt": pair["prompt"], "completion": pair["chosen" if good else "rejected"], "label": good}
        for pair in pairs
        for good in (True, False)
    ]
    return Dataset.from_list(rows)


def main() -> None:
    """Train, evaluate and save."""
    kind = sys.argv[sys.argv.index("--kind") + 1]
    module = importlib.import_module(f"trl.experimental.{kind.lower()}") if kind in ("CPO", "ORPO") else trl
    script, args = trl.TrlParser((ScriptArguments, getattr(module, f"{kind}Config"))).parse_args_and_config()
    lora = script.method == "lora"
    if kind == "Reward":
        model = seeded(LlamaForSequenceClassification, llama_config(num_labels=1))
    else:
        model = seeded(LlamaForCausalLM, llama_config())
    more = {}
    if kind in ("DPO", "KTO") and not lora:
        more["ref_model"] = seeded(LlamaForCausalLM, llama_config())
    if lora:
        more["peft_config"] = LoraConfig(r=4)
    data = labeled() if kind == "KTO" else preferences()
    trainer = getattr(module, f"{kind}Trainer")(
        model=model,
        args=args,
        train_dataset=data.select(range(80)),
        eval_dataset=data.select(range(80, 96)),
        processing_class=tokenizer(),
        **more,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    report(trainer, evaluation=trainer.evaluate())


if __name__ == "__main__":
    main()
