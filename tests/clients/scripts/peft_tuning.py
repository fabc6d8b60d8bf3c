"""PEFT on transformers' Trainer; --method: lora, or prompt (trained prompt tokens before a frozen model)."""

from dataclasses import dataclass, field

import workflow
from assets import language_modeling, llama_config, seeded, tokenizer
from peft import LoraConfig, PeftModel, PromptTuningConfig, PromptTuningInit, TaskType, get_peft_model
from transformers import DataCollatorForLanguageModeling, LlamaForCausalLM, Trainer, TrainingArguments


@dataclass
class MethodArguments:
    """How the model is tuned."""

    method: str = field(default="lora", metadata={"help": "lora or prompt"})


def peft_config(method: str):
    """The configuration of ``method``."""
    if method == "lora":
        return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type=TaskType.CAUSAL_LM)
    return PromptTuningConfig(
        task_type=TaskType.CAUSAL_LM, prompt_tuning_init=PromptTuningInit.RANDOM, num_virtual_tokens=6
    )


def main() -> None:
    """Train, evaluate and save the adapter."""
    model_args, method_args, args = workflow.parse(workflow.ModelArguments, MethodArguments, TrainingArguments)
    tokens = tokenizer()
    base = seeded(LlamaForCausalLM, llama_config())
    if model_args.model_name_or_path:
        model = PeftModel.from_pretrained(base, model_args.model_name_or_path, is_trainable=args.do_train)
    else:
        model = seeded(get_peft_model, base, peft_config(method_args.method))
    model.print_trainable_parameters()
    data = workflow.preprocessed(
        args, language_modeling(), lambda rows: tokens(rows["text"], truncation=True, max_length=48), "texts"
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data.select(range(80)),
        eval_dataset=data.select(range(80, 96)),
        processing_class=tokens,
        data_collator=DataCollatorForLanguageModeling(tokens, mlm=False),
    )
    workflow.run(trainer, args)


if __name__ == "__main__":
    main()
