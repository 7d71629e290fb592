"""torchtitan: its HSDP, with the exchange between islands by a recipe."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from torch import nn
from torchtitan.protocols.model_spec import ModelSpec

from thinwire.checked import BODY, checked
from thinwire.integrations import Shards, shard
from thinwire.reducer import Reducer

_Spec = TypeVar("_Spec", bound=ModelSpec)


@checked
def compressed(
    spec: _Spec,
    recipe: Annotated[Callable[[], Reducer], BODY],
    *,
    attached: Callable[[Shards], None] = lambda handle: None,
) -> _Spec:
    """Return a torchtitan ModelSpec whose replicas exchange gradients by a recipe; everything else stays.

    With `parallelism.data_parallel_replicate_degree` R and `data_parallel_shard_degree` S, FSDP2 shards within each
    group of S ranks, and `thinwire.shard` exchanges between the R. It is called as soon as torchtitan has initialised
    the weights and built the optimizer. torchtitan divides the loss by the tokens of all ranks, so gradients are
    summed, by the recipe too. While training is set up, raises ValueError for a replicate degree of 1, for a
    `parallelism.spmd_backend` other than "partial_dtensor", and for pipelines, tensor, context and expert parallelism,
    which have not been tried; and whatever `thinwire.shard` raises.

    Args:
        spec: torchtitan's, such as `model_registry("8B")`.
        recipe: A function that returns a recipe, such as `lambda: thinwire.recipes.topk(density=0.01)`.
        attached: Called with the handle.
    """
    if not callable(recipe):
        raise TypeError(f"recipe is {recipe!r:.60}; expected a function that makes one: lambda: {recipe!r:.60}")

    def parallelize(model: nn.Module, *, parallel_dims: Any, **options: Any) -> nn.Module:
        _check(parallel_dims)
        return spec.parallelize_fn(model, parallel_dims=_island(parallel_dims), **options)

    def built(optimizers: Any, model_parts: list[nn.Module], parallel_dims: Any) -> None:
        if spec.post_optimizer_build_fn is not None:
            spec.post_optimizer_build_fn(optimizers, model_parts, parallel_dims)
        (model,) = model_parts
        mesh = parallel_dims.get_mesh("dp_replicate")
        attached(shard(model, recipe(), mesh=mesh, optimizer=list(optimizers)))

    return dataclasses.replace(spec, parallelize_fn=parallelize, post_optimizer_build_fn=built)


_UNTRIED = {"pp": "pipeline", "tp": "tensor", "cp": "context", "ep": "expert"}


def _check(dims: Any) -> None:
    if dims.dp_replicate < 2:
        raise ValueError(
            f"parallelism.data_parallel_replicate_degree is {dims.dp_replicate}; expected 2 or more, as the recipe "
            "exchanges gradients between replicas"
        )
    if dims.spmd_backend != "partial_dtensor":
        raise ValueError(
            f'parallelism.spmd_backend is {dims.spmd_backend!r}; expected "partial_dtensor": the others lay parameters '
            "out over the replicate dimension too"
        )
    for name, kind in _UNTRIED.items():
        if (degree := getattr(dims, name)) > 1:
            raise ValueError(
                f"parallelism.{kind}_parallel_degree is {degree}; expected 1: with {kind} parallelism this has not "
                "been tried, so use torchtitan's own HSDP"
            )


def _island(dims: Any) -> Any:
    """Return the parallel dimensions as they are within an island: there is no replicate dimension."""
    dims.get_optional_mesh("batch")  # builds the meshes, which both share
    island, exists = copy.copy(dims), dims._mesh_exist
    island.dp_replicate = 1
    island._mesh_exist = lambda name, degree: name != "dp_replicate" and exists(name, degree)
    island._multi_axis_meshes = dict(dims._multi_axis_meshes)
    return island
