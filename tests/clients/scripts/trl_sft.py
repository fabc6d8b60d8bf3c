"""Supervised fine-tuning with TRL; --method: plain (model by name), lora, packing, completion (only answers)."""

from dataclasses import dataclass, field

from assets import conversations, language_modeling, llama_config, report, seeded, tokenizer
from peft import LoraConfig
from transformers import LlamaForCausalLM
from trl import SFTConfig, SFTTrainer, TrlParser


@dataclass
class ScriptArguments:
    """What is trained."""

    method: str = field(default="plain", metadata={"help": "plain, lora, packing or completion"})


def saved(model: LlamaForCausalLM, args: SFTConfig) -> str:
    """The name of a model that TRL loads itself: a directory that the main process writes."""
    directory = f"{args.output_dir.rstrip('/')}-model"
    with args.main_process_first(local=False):
        if args.process_index == 0:
            model.save_pretrained(directory)
    return directory


def main() -> None:
    """Train, evaluate and save."""
    script, args = TrlParser((ScriptArguments, SFTConfig)).parse_args_and_config()
    args.packing = script.method == "packing"
    args.assistant_only_loss = script.method == "completion"
    data = (conversations if script.method == "completion" else language_modeling)()
    model = seeded(LlamaForCausalLM, llama_config())
    trainer = SFTTrainer(
        model=saved(model, args) if script.method == "plain" else model,
        args=args,
        train_dataset=data.select(range(80)),
        eval_dataset=data.select(range(80, 96)),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4) if script.method == "lora" else None,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    report(trainer, evaluation=trainer.evaluate()["eval_loss"])


if __name__ == "__main__":
    main()
