"""``prepare`` for models, loaders and optimizers of scripts, and access to weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from ds_trainer.accelerator.collectives import Collectives
from ds_trainer.arguments.accelerator_config import accelerator_config
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.checkpoint.weights.model_saving import save_weights
from ds_trainer.data.loader import PlannedLoader
from ds_trainer.data.stream import StreamLoader
from ds_trainer.engine.weights import host_copies, plan_shards
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.units import parse_size

if TYPE_CHECKING:
    from ds_trainer.engine.training_engine import TrainingEngine


class PreparedObjects(Collectives):
    """``prepare`` and related methods. There is one engine, for the Trainer's model; nothing here creates another."""

    def __init__(
        self,
        layout: ParallelLayout,
        args: TrainingArguments,
        join_ranks: Callable[[], None],
        get_engine: Callable[[], TrainingEngine | None],
        get_model: Callable[[], nn.Module | None],
    ) -> None:
        super().__init__(layout, args, join_ranks)
        self.get_engine = get_engine
        self._get_model = get_model

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:
        """Each object ready for use, in the given order; a single object is not wrapped in a tuple.

        Models as :meth:`prepare_model`, loaders as :meth:`prepare_data_loader`. Optimizers, schedules and anything
        else come back unchanged: the engine wraps those of the Trainer in ``train``.

        Args:
            objects: models, loaders, optimizers, schedules.
            device_placement: ignored, for compatibility; everything goes to the rank's device.
        """
        prepared = tuple(self._prepared(thing) for thing in objects)
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepared(self, thing: Any) -> Any:
        if isinstance(thing, nn.Module):
            return self.prepare_model(thing)
        return self.prepare_data_loader(thing) if isinstance(thing, DataLoader) else thing

    def prepare_model(self, model: nn.Module, device_placement: Any = None, evaluation_mode: bool = False) -> nn.Module:
        """The engine for the trained model (the model itself before ``train``); any other model on the device.

        Another model (a reference or reward model) gets no engine: it is not sharded, keeps its dtype, and is in
        evaluation mode.

        Args:
            model: the model.
            device_placement: ignored, for compatibility.
            evaluation_mode: the model is not trained.

        Raises:
            ConfigError: another model with trainable parameters, without ``evaluation_mode``.
        """
        engine = self.get_engine()
        if engine is not None and model in (engine.deepspeed, engine.deepspeed.module):
            return engine.deepspeed
        if model is self._get_model():
            return model
        trainable = sum(p.requires_grad for p in model.parameters())
        if trainable and not evaluation_mode:
            raise ConfigError(
                f"accelerator.prepare: a second {type(model).__name__} with {trainable} trainable parameter tensors, "
                "but the only engine is that of trainer.model: these gradients would not be reduced. Freeze them with "
                "requires_grad_(False), call prepare_model(model, evaluation_mode=True), or combine both models in one "
                "module."
            )
        return model.to(self.device).eval()

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: Any = None, slice_fn_for_dispatch: Any = None
    ) -> DataLoader[Any]:
        """This rank's part of a plain ``DataLoader``, on the device; accelerate repeats samples to fill the last batch.

        Loaders of the Trainer already read this rank's part and are returned unchanged.

        Args:
            data_loader: yields equal batches on all ranks.
            device_placement: False leaves batches on their device.
            slice_fn_for_dispatch: as in accelerate.
        """
        from accelerate.data_loader import prepare_data_loader

        ours = isinstance(data_loader, (PlannedLoader, StreamLoader))
        if ours or getattr(data_loader, "_is_accelerate_prepared", False):
            return data_loader
        if self.use_distributed:
            self.join_group()
        config = accelerator_config(self._args)
        return prepare_data_loader(
            data_loader,
            self.device,
            num_processes=self._layout.dp,
            process_index=self._layout.coordinates(self.process_index).dp,
            put_on_device=device_placement is not False,
            rng_types=["generator"],
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            split_batches=config.split_batches,
            dispatch_batches=config.dispatch_batches,
            even_batches=config.even_batches,
            use_seedable_sampler=config.use_seedable_sampler,
            non_blocking=config.non_blocking,
            data_seed=self._args.data_seed,
        )

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> Any:
        """A loader that skips the first ``num_batches``.

        Raises:
            ConfigError: it is a loader of the Trainer, which can start at any sample with ``start``.
        """
        from accelerate.data_loader import skip_first_batches

        if isinstance(dataloader, (PlannedLoader, StreamLoader)):
            raise ConfigError("skip_first_batches: call loader.start(epoch, first_sample), which reads no data twice.")
        if self.use_distributed:
            self.join_group()
        return skip_first_batches(dataloader, num_batches)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The module inside an engine or a parallel wrapper.

        Args:
            model: wrapped or not.
            keep_fp32_wrapper: as in accelerate.
            keep_torch_compile: keep the wrapper of ``torch.compile``.
        """
        from accelerate.utils import extract_model_from_parallel

        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Full tensors of ``model`` by name, in host memory. Collective if ZeRO-3 shards it.

        Args:
            model: wrapped or not.
            unwrap: ignored, for compatibility; names are always those of the unwrapped module.

        Returns:
            Copies on every rank; of a sharded model on the main process only, empty elsewhere.
        """
        named = self.unwrap_model(model, keep_torch_compile=False).state_dict(keep_vars=True)
        tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
        sharded = any(hasattr(tensor, "ds_id") for tensor in tensors.values())
        shards = plan_shards(tensors, parse_size(self._args.max_shard_size))
        whole: dict[str, Tensor] = {}
        for part in host_copies(tensors, shards, keep=self.is_main_process or not sharded):
            whole.update(part)
        return whole

    def save_model(
        self, model: nn.Module, save_directory: str, max_shard_size: str = "10GB", safe_serialization: bool = True
    ) -> None:
        """Write the weights of ``model`` as safetensors (``trainer.save_model`` adds configuration and tokenizer).

        Args:
            model: wrapped or not.
            save_directory: created if missing.
            max_shard_size: largest size of one file.
            safe_serialization: must be True.

        Raises:
            ConfigError: pickled weights are requested.
        """
        if not safe_serialization:
            raise ConfigError("accelerator.save_model writes safetensors only: leave safe_serialization=True.")
        if self.use_distributed:
            self.join_group()
        save_weights(self.unwrap_model(model), Path(save_directory), parse_size(max_shard_size))

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """``torch.save`` (or safetensors) on the main process; with ``save_on_each_node`` on that of every machine."""
        from accelerate.utils import save

        if self.use_distributed:
            self.join_group()
        save(obj, f, save_on_each_node=self._args.save_on_each_node, safe_serialization=safe_serialization)

    def free_memory(self, *objects: Any) -> list[Any]:
        """Drop ``objects``, collect garbage, and empty the device's cache. The Trainer's engine stays.

        Returns:
            None for each object, to be assigned to its variable.
        """
        from accelerate.utils import release_memory

        return release_memory(*objects)

    def clear(self, *objects: Any) -> list[Any]:
        """:meth:`free_memory`."""
        return self.free_memory(*objects)
