"""Direct preference optimization with TRL; --method: plain or lora."""

from dataclasses import dataclass, field

from assets import llama_config, preferences, report, seeded, tokenizer
from peft import LoraConfig
from transformers import LlamaForCausalLM
from trl import DPOConfig, DPOTrainer, TrlParser


@dataclass
class ScriptArguments:
    """What is trained."""

    method: str = field(default="plain", metadata={"help": "plain or lora"})


def main() -> None:
    """Train, evaluate and save."""
    script, args = TrlParser((ScriptArguments, DPOConfig)).parse_args_and_config()
    data = preferences()
    lora = script.method == "lora"
    trainer = DPOTrainer(
        model=seeded(LlamaForCausalLM, llama_config()),
        ref_model=None if lora else seeded(LlamaForCausalLM, llama_config()),
        args=args,
        train_dataset=data.select(range(80)),
        eval_dataset=data.select(range(80, 96)),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4) if lora else None,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    report(trainer, evaluation=trainer.evaluate())


if __name__ == "__main__":
    main()
