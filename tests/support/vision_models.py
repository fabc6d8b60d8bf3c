"""Tiny vision-language models of several families: random weights, real processors, templates of their forms."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.chat_model import chat_tokenizer

# Written here, for text and images alone: the text that the models of each family are trained on.
_PIECES = (
    "{% macro pieces(content, image) %}{% for part in ([{'text': content}] if content is string else content) %}"
    "{{ image if part.type == 'image' else part.text }}{% endfor %}{% endmacro %}"
)
_IM_TURNS = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + pieces(message.content, image) }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
)
_QWEN2_VL = (
    _PIECES + "{% set image = '<|vision_start|><|image_pad|><|vision_end|>' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' if messages[0].role != 'system' }}" + _IM_TURNS
)
_INTERNVL = _PIECES + "{% set image = '<IMG_CONTEXT>\n' %}" + _IM_TURNS
# Images come before the text of a turn; it takes parts only, as the next one does.
_LLAVA = (
    "{% for turn in messages %}{{ turn.role | upper + ': ' if turn.role != 'system' }}"
    "{% for part in turn.content if part.type == 'image' %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in turn.content if part.type == 'text' %}{% if turn.role == 'assistant' %}"
    "{% generation %}{{ part.text + '</s>' }}{% endgeneration %}{% else %}{{ part.text + ' ' }}{% endif %}"
    "{% endfor %}{% endfor %}{{ 'ASSISTANT:' if add_generation_prompt }}"
)
_IDEFICS3 = (
    "{{ '<|im_start|>' }}{% for turn in messages %}"
    "{{ turn.role | capitalize + (':' if turn.content[0].type == 'image' else ': ') }}"
    "{% for part in turn.content %}{{ {'text': part.text, 'image': '<image>'}.get(part.type, '') }}{% endfor %}"
    "{{ '<end_of_utterance>\n' }}{% endfor %}{{ 'Assistant:' if add_generation_prompt }}"
)
# The first turn begins with the system prompt, and questions and answers alternate.
_GEMMA3 = (
    "{{ bos_token }}{% set before = namespace(system='', role='assistant') %}{% for turn in messages %}"
    "{% if loop.first and turn.role == 'system' %}"
    "{% set before.system = (turn.content if turn.content is string else turn.content[0].text) + '\n\n' %}"
    "{% else %}{% if (turn.role == 'user') == (before.role == 'user') %}"
    "{{ raise_exception('A question must follow an answer, and an answer a question.') }}{% endif %}"
    "{{ '<start_of_turn>' + {'assistant': 'model'}.get(turn.role, turn.role) + '\n' + before.system }}"
    "{% for part in ([{'text': turn.content}] if turn.content is string else turn.content) %}"
    "{{ '<start_of_image>' if part.type == 'image' else part.text | trim }}{% endfor %}{{ '<end_of_turn>\n' }}"
    "{% set before.system = '' %}{% set before.role = turn.role %}{% endif %}{% endfor %}"
    "{{ '<start_of_turn>model\n' if add_generation_prompt }}"
)

FAMILIES = ("llava", "qwen2_vl", "qwen2_5_vl", "gemma3", "idefics3", "smolvlm", "internvl")


def make_processor(family: str) -> Any:
    """The processor of a family, for images of a few patches."""
    import transformers as hf

    if family == "llava":
        tokenizer = _tokenizer(["<image>", "</s>"], bos="<s>")
        image = hf.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
        return hf.LlavaProcessor(
            image, tokenizer, patch_size=8, vision_feature_select_strategy="default", chat_template=_LLAVA,
            num_additional_image_tokens=1
        )  # fmt: skip
    if family in ("qwen2_vl", "qwen2_5_vl"):
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        tokenizer = _tokenizer(["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"])
        image = Qwen2VLImageProcessorPil(
            patch_size=4, merge_size=2, size={"shortest_edge": 8 * 8, "longest_edge": 32 * 32}
        )
        return _without_videos(hf.Qwen2VLProcessor)(image, tokenizer, chat_template=_QWEN2_VL)
    if family == "gemma3":
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
        tokenizer = _tokenizer(["<start_of_turn>", "<end_of_turn>"], bos="<bos>", names=names)
        image = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
        return hf.Gemma3Processor(image, tokenizer, chat_template=_GEMMA3, image_seq_length=4)
    if family in ("idefics3", "smolvlm"):
        words = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
        words += [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
        if family == "idefics3":
            from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

            kind, image_kind = hf.Idefics3Processor, Idefics3ImageProcessorPil
        else:
            from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

            kind, image_kind = hf.SmolVLMProcessor, SmolVLMImageProcessorPil
        image = image_kind(size={"longest_edge": 32}, max_image_size={"longest_edge": 16}, resample=2)
        more = {} if family == "idefics3" else {"video_processor": None}
        return kind(image, _tokenizer(words), image_seq_len=1, chat_template=_IDEFICS3, **more)
    if family == "internvl":
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

        names = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
                 "video_token": "<video>"}  # fmt: skip
        image = GotOcr2ImageProcessorPil(size={"height": 16, "width": 16}, crop_to_patches=True, max_patches=4)
        kind = _without_videos(hf.InternVLProcessor)
        return kind(image, _tokenizer([], names=names), image_seq_length=4, chat_template=_INTERNVL)
    raise ValueError(family)


def _without_videos(kind: Any) -> Any:
    """A class of processors without the part for videos, which needs torchvision."""
    from transformers import ProcessorMixin

    class Images(kind):
        def __init__(self, image_processor: Any = None, tokenizer: Any = None, **options: Any) -> None:
            template = options.pop("chat_template")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ProcessorMixin, "__init__", lambda self, *arguments, **keywords: None)
                super().__init__(image_processor, tokenizer, None, **options)
            self.image_processor, self.tokenizer, self.chat_template = image_processor, tokenizer, template

    Images.__name__ = kind.__name__
    return Images


def make_model(family: str, processor: Any, seed: int = 0) -> Any:
    """A model of a few thousand parameters for ``processor``."""
    import torch
    import transformers as hf

    tokenizer = processor.tokenizer
    text = dict(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id, initializer_range=0.2,
        tie_word_embeddings=False
    )  # fmt: skip
    vision = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=16,
                  patch_size=8, initializer_range=0.2)  # fmt: skip
    id_of = tokenizer.convert_tokens_to_ids
    if family == "llava":
        config: Any = hf.LlavaConfig(
            vision_config=hf.CLIPVisionConfig(**vision, projection_dim=16), text_config=hf.LlamaConfig(**text),
            image_token_index=id_of("<image>"), image_seq_length=4, tie_word_embeddings=False
        )  # fmt: skip
    elif family in ("qwen2_vl", "qwen2_5_vl"):
        rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
        ids = {f"{kind}_token_id": id_of(f"<|{kind}_pad|>") for kind in ("image", "video")}
        ids |= {f"vision_{side}_token_id": id_of(f"<|vision_{side}|>") for side in ("start", "end")}
        shared = dict(depth=2, num_heads=2, patch_size=4, spatial_merge_size=2, temporal_patch_size=2,
                      initializer_range=0.2)  # fmt: skip
        kind = hf.Qwen2VLConfig if family == "qwen2_vl" else hf.Qwen2_5_VLConfig
        own: dict[str, Any] = dict(embed_dim=16, hidden_size=32, mlp_ratio=2)
        if family == "qwen2_5_vl":
            own = dict(
                hidden_size=16, out_hidden_size=32, intermediate_size=24, window_size=8, fullatt_block_indexes=[1]
            )
        config = kind(text_config={**text, "rope_parameters": rope}, vision_config={**shared, **own},
                      tie_word_embeddings=False, **ids)  # fmt: skip
    elif family == "gemma3":
        config = hf.Gemma3Config(
            text_config={**text, "head_dim": 16, "sliding_window": 64}, vision_config={**vision, "patch_size": 4},
            mm_tokens_per_image=4, boi_token_index=tokenizer.boi_token_id, eoi_token_index=tokenizer.eoi_token_id,
            image_token_index=tokenizer.image_token_id, initializer_range=0.2
        )  # fmt: skip
    elif family in ("idefics3", "smolvlm"):
        kind = hf.Idefics3Config if family == "idefics3" else hf.SmolVLMConfig
        config = kind(
            text_config=hf.LlamaConfig(**text), vision_config=vision, image_token_id=id_of("<image>"), scale_factor=2,
            pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=False
        )  # fmt: skip
    elif family == "internvl":
        config = hf.InternVLConfig(
            vision_config={**vision, "image_size": [16, 16], "patch_size": [4, 4]}, text_config=hf.Qwen2Config(**text),
            image_token_id=tokenizer.context_image_token_id, image_seq_length=4, downsample_ratio=0.5,
            tie_word_embeddings=False
        )  # fmt: skip
    else:
        raise ValueError(family)
    torch.manual_seed(seed)
    return hf.AutoModelForImageTextToText.from_config(config)


def save_vision_model(directory: Path, family: str, seed: int = 0) -> Path:
    """Write model and processor of ``family``; returns ``directory``."""
    processor = make_processor(family)
    make_model(family, processor, seed).save_pretrained(directory)
    processor.save_pretrained(directory)
    return directory


def picture(width: int, height: int, seed: int) -> Any:
    """A pillow image of noise."""
    from PIL import Image

    values = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def as_base64(image: Any) -> str:
    """The image as a PNG file, in base64."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def _tokenizer(words: list[str], bos: str | None = None, names: dict[str, str] | None = None) -> Any:
    tokenizer = chat_tokenizer(None)
    tokenizer.add_tokens([*words, *([] if bos is None else [bos])], special_tokens=True)
    if bos is not None:
        tokenizer.bos_token = bos
    if names:
        tokenizer.add_special_tokens({"extra_special_tokens": names} if False else {})
        tokenizer.add_tokens(list(names.values()), special_tokens=True)
        tokenizer._set_model_specific_special_tokens(special_tokens=names)
    return tokenizer
