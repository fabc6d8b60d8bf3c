"""``PlannedModel``: parameters of models of every kind are those of transformers' own modules."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer.planner.candidate import Candidate
from ds_trainer.planner.cluster import Cluster
from ds_trainer.planner.memory.estimate import estimate_memory
from ds_trainer.planner.parameters.groups import total, total_by_kind
from ds_trainer.planner.planned_model import PlannedModel, bitsandbytes_bytes
from ds_trainer.planner.step_time import step_time
from ds_trainer.utils.errors import ConfigError

transformers = pytest.importorskip("transformers")

# Family, class of the model, kind, parameters that were published or that transformers counts (None: only the latter).
MODELS: dict[str, tuple[str, str, str, float | None]] = {
    "GPT-2": ("gpt2", "GPT2LMHeadModel", "decoder", 124_439_808),
    "Llama 2 7B": ("llama", "LlamaForCausalLM", "decoder", 6_738_415_616),
    "Mistral 7B": ("mistral", "MistralForCausalLM", "decoder", 7_241_732_096),
    "Mixtral 8x7B": ("mixtral", "MixtralForCausalLM", "decoder", 46_702_792_704),
    "Falcon 7B": ("falcon", "FalconForCausalLM", "decoder", None),
    # 671,026,419,200 were published; the biases of the routers are buffers here.
    "DeepSeek V3": ("deepseek_v3", "DeepseekV3ForCausalLM", "decoder", 671_026_404_352),
    "gpt-oss 120B": ("gpt_oss", "GptOssForCausalLM", "decoder", 116_829_156_672),
    "Mamba": ("mamba", "MambaForCausalLM", "encoder", None),
    "BERT": ("bert", "BertForMaskedLM", "encoder", 109_514_298),
    "BERT, two classes": ("bert", "BertForSequenceClassification", "encoder", 109_483_778),
    "RoBERTa": ("roberta", "RobertaForMaskedLM", "encoder", None),
    "ModernBERT": ("modernbert", "ModernBertForMaskedLM", "encoder", 149_655_232),
    "DeBERTa": ("deberta-v2", "DebertaV2ForTokenClassification", "encoder", None),
    "ELECTRA": ("electra", "ElectraForMaskedLM", "encoder", None),
    "DistilBERT": ("distilbert", "DistilBertForQuestionAnswering", "encoder", None),
    "ALBERT": ("albert", "AlbertForMaskedLM", "encoder", None),
    "ViT": ("vit", "ViTForImageClassification", "encoder", 85_800_194),
    "T5": ("t5", "T5ForConditionalGeneration", "encoder-decoder", 60_506_624),
    "BART": ("bart", "BartForConditionalGeneration", "encoder-decoder", 406_291_456),
    "Whisper": ("whisper", "WhisperForConditionalGeneration", "encoder-decoder", None),
    "LLaVA": ("llava", "LlavaForConditionalGeneration", "vision-language", None),
    "Qwen2-VL": ("qwen2_vl", "Qwen2VLForConditionalGeneration", "vision-language", None),
    "Gemma 3": ("gemma3", "Gemma3ForConditionalGeneration", "vision-language", None),
    "PaliGemma": ("paligemma", "PaliGemmaForConditionalGeneration", "vision-language", None),
    "CLIP": ("clip", "CLIPModel", "vision-language", 151_277_313),
}


def config_of(family: str, class_name: str) -> dict[str, Any]:
    config = transformers.AutoConfig.for_model(family, architectures=[class_name])
    return json.loads(config.to_json_string(use_diff=False))


def on_meta(family: str, class_name: str, **values: Any) -> Any:
    config = transformers.AutoConfig.for_model(family, **values)
    with torch.device("meta"):
        return getattr(transformers, class_name)(config)


@pytest.mark.cases(11, rest="extended")
@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_module(name: str) -> None:
    family, class_name, kind, published = MODELS[name]
    module = on_meta(family, class_name)
    found = PlannedModel.from_config(config_of(family, class_name), name)
    wanted = sum(parameter.numel() for parameter in module.parameters())
    assert found.total == sum(total_by_kind(found.parameters).values()) == wanted
    assert found.trainable == sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    assert published is None or wanted == published
    assert found.family == family and found.transformer.kind == kind
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    assert found.rows == (0 if head is None else head.weight.shape[0])
    # The stacks have the weights that they need to explain the matrices of their layers.
    for index, stack in enumerate(found.transformer.stacks):
        groups = [one for one in found.parameters if one.stack == index and len(one.shape) > 1]
        matrices = total(groups) * (stack.layers if family == "albert" else 1)
        attentions = 2 if stack.cross_attention else 1
        explained = stack.layers * attentions * stack.attention_weights + stack.mlp_weights(stack.experts)
        assert explained == pytest.approx(matrices, rel=0.002)


def test_kinds_by_hand() -> None:
    """BERT base: 30522, 512 and 2 rows of 768; 12 layers of 4 and 8 squares; the head adds a square and biases."""
    width, found = 768, PlannedModel.from_config(config_of("bert", "BertForMaskedLM"))
    assert total_by_kind(found.parameters) == {
        "embedding": (30522 + 512 + 2) * width,
        "attention": 12 * 4 * (width * width + width),
        "mlp": 12 * (8 * width * width + 5 * width),
        "norm": (2 + 12 * 4 + 2) * width,
        "head": width * width + width + 30522,
    }


def test_the_stacks_of_a_vision_language_model() -> None:
    found = PlannedModel.from_config(config_of("llava", "LlavaForConditionalGeneration"))
    tower, text = found.transformer.stacks
    assert (tower.layers, tower.hidden_size, tower.heads, tower.positions) == (24, 1024, 16, 577)
    assert not tower.causal and tower.family == "clip_vision_model"
    assert (text.layers, text.hidden_size, text.positions, text.causal) == (32, 4096, None, True)
    assert found.stack is text and found.activations("sdpa", "bf16")[1] == "llama"


@pytest.mark.parametrize("name", ["BERT", "T5", "LLaVA", "DeepSeek V3", "ViT", "Mamba"])
def test_every_kind_can_be_planned(name: str) -> None:
    family, class_name, _, _ = MODELS[name]
    model = PlannedModel.from_config(config_of(family, class_name))
    run = Candidate(8, 512, stage=3, micro_batch=2)
    assert estimate_memory(model, run).device > 0
    assert step_time(model, run, Cluster.of("H100-80GB", 1, 8)).seconds > 0


class Plain(nn.Module):
    """No transformers model: convolutions, a list of blocks, a tied and a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 4, 64) for _ in range(3))
        self.out = nn.Linear(16, 50, bias=False)
        self.out.weight = self.embedding.weight
        self.probe = nn.Linear(16, 2)
        for parameter in self.probe.parameters():
            parameter.requires_grad = False


def test_a_plain_module() -> None:
    with torch.device("meta"):
        module = Plain()
    found = PlannedModel.from_module(module)
    assert found.name == found.family == "Plain" and found.rows == 0
    assert found.total == sum(parameter.numel() for parameter in module.parameters())
    assert found.total - found.trainable == 16 * 2 + 2
    kinds = total_by_kind(found.parameters)
    assert kinds["embedding"] == 50 * 16 and kinds["attention"] == 3 * (4 * 16 * 16 + 4 * 16)
    stack = found.stack
    assert (stack.layers, stack.hidden_size, stack.heads, stack.intermediate_size) == (3, 16, 4, 64)


def test_a_module_without_layers_and_one_without_parameters() -> None:
    found = PlannedModel.from_module(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)))
    assert found.total == 8 * 32 + 32 + 32 * 4 + 4
    assert found.stack.layers == 1 and found.transformer.weights == 8 * 32 + 32 * 4
    with pytest.raises(ConfigError, match="ReLU has no parameters"):
        PlannedModel.from_module(nn.ReLU())


def test_adapters_of_peft_are_apart() -> None:
    peft = pytest.importorskip("peft")
    module = on_meta("llama", "LlamaForCausalLM", num_hidden_layers=2)
    plain = PlannedModel.from_module(module)
    linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    wrapped = peft.get_peft_model(module, peft.LoraConfig(r=4, target_modules=linear), low_cpu_mem_usage=True)
    found = PlannedModel.from_module(wrapped)
    assert found.total == plain.total and total_by_kind(found.parameters) == total_by_kind(plain.parameters)
    assert found.stack == plain.stack and found.rows == plain.rows and found.family == "llama"
    assert found.trainable == total(found.adapters) == wrapped.get_nb_trainable_parameters()[0]
    described = PlannedModel.from_config(module.config.to_dict(), lora_rank=4)
    assert found.trainable == described.trainable and described.total == plain.total
    assert found.weight_bytes(2) == described.weight_bytes(2) == 2 * (plain.total + found.trainable)


def test_quantized_weights_have_their_own_bytes() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    module = nn.ModuleDict({"norm": nn.LayerNorm(128), "up_proj": nn.Linear(128, 512, bias=False)})
    packed = bitsandbytes.nn.Linear4bit(128, 512, bias=False, quant_type="nf4")
    packed.load_state_dict({"weight": torch.randn(512, 128)})
    module["up_proj"] = packed.to("cpu")
    assert module["up_proj"].weight.dtype == torch.uint8
    for parameter in module["up_proj"].parameters():
        parameter.requires_grad = False
    found = PlannedModel.from_module(module)
    assert found.total == 128 * 512 + 2 * 128 and found.trainable == 2 * 128
    blocks = 128 * 512 // 64  # each with a scale in one byte, and 256 of those with one in float32
    assert found.weight_bytes(2) == 128 * 512 / 2 + blocks + 4 * blocks // 256 + 2 * 2 * 128


@pytest.mark.parametrize("double", [False, True])
def test_a_quantized_base_is_planned_from_its_configuration(double: bool) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    from transformers import LlamaConfig, LlamaForCausalLM

    # Widths that are whole blocks of scales: 64 elements, and 256 of these blocks.
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**shape, vocab_size=128, tie_word_embeddings=False)
    module = LlamaForCausalLM(config)
    for name, linear in list(module.named_modules()):
        if isinstance(linear, nn.Linear) and name != "lm_head":
            packed = bitsandbytes.nn.Linear4bit(
                linear.in_features, linear.out_features, bias=False, compress_statistics=double, quant_type="nf4"
            )
            packed.load_state_dict({"weight": linear.weight.detach()})
            parent, _, last = name.rpartition(".")
            setattr(module.get_submodule(parent), last, packed.to("cpu"))
    options = {"load_in_4bit": True, "bnb_4bit_use_double_quant": double}
    planned = PlannedModel.from_config(config.to_dict()).quantized(bitsandbytes_bytes(options))
    found = PlannedModel.from_module(module)
    assert planned.total == found.total
    # A weight of 256 x 256 has fewer blocks of scales than one float32 is for.
    assert planned.weight_bytes(2) == pytest.approx(found.weight_bytes(2), rel=1e-4 if double else 1e-12)
    assert planned.weight_bytes(2) < PlannedModel.from_config(config.to_dict()).weight_bytes(2) / 2


def test_another_depth_has_the_parameters_of_that_depth() -> None:
    for family, class_name in (("llava", "LlavaForConditionalGeneration"), ("qwen2_moe", "Qwen2MoeForCausalLM")):
        config = config_of(family, class_name)
        shallow = json.loads(json.dumps(config))
        shallow.get("text_config", shallow)["num_hidden_layers"] = 8
        shallow.get("text_config", shallow).pop("layer_types", None)
        assert PlannedModel.from_config(config).with_layers(8).total == PlannedModel.from_config(shallow).total


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "unheard_of"}, "x: transformers .* has no model_type='unheard_of'"),
        ({}, "x: transformers .* has no model_type=None"),
        ({"model_type": "gpt2", "n_layer": 10**9}, "x: n_layer=1,000,000,000 is more than the 10,000 layers that are"),
        ({"model_type": ["llama"]}, r"x: transformers .* has no model_type=\['llama'\]"),
        ({"model_type": "gpt2", "vocab_size": 0, "n_layer": 1}, r"x: \S*weight has no element with .*; correct"),
        ({"model_type": "bert", "hidden_size": 100, "num_attention_heads": 7}, "x: a bert model cannot be made"),
    ],
)
def test_mistakes_are_one_sentence(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        PlannedModel.from_config(config, "x")
    assert "\n" not in str(error.value)


def test_without_transformers() -> None:
    """Common decoders need neither torch nor transformers; another family says what it needs."""
    code = """
import sys
sys.modules["transformers"] = None
from ds_trainer.planner.planned_model import PlannedModel
from tests.planner.test_anchors import LLAMA_8B
print(PlannedModel.from_config(LLAMA_8B).total, "torch" in sys.modules)
PlannedModel.from_config({"model_type": "bert"}, "x")
"""
    from tests.planner.test_anchors import LLAMA_8B

    code = code.replace("from tests.planner.test_anchors import LLAMA_8B", f"LLAMA_8B = {LLAMA_8B!r}")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["8030261248", "False"], done.stderr
    assert "ConfigError: x: model_type='bert' needs transformers to be planned" in done.stderr
