"""Split attention on several GPUs of one process: forward and backward beside one GPU, and beside cuDNN.

    python -m tools.bench.bench_context --kernels FOLDER [--record FILE]     on a machine with two GPUs or more
    python -m tools.bench.bench_context --build FOLDER                       compiles the kernels without a GPU

Times are milliseconds of the forward, and of forward and backward together: medians. The share is that of a perfect
split: one GPU's time / devices / time. cuDNN is jax.nn.dot_product_attention(implementation="cudnn") on one GPU, and on
all with keys, values and queries gathered, because it has no causal mask that starts at another row. The memory is MiB
of temporary buffers that the program of forward and backward takes on each device, beside operands and results.

Rows of the sequence come first, then batch and heads, which a mesh splits whose axis is Auto or Explicit.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

HEADS, HEADS_KEY, HEAD_DIM = 32, 8, 128
TOKENS: Final = (8192, 32768, 131072)
SPLITS: Final = (
    ("all_gather", "zigzag"),
    ("ulysses", None),
    ("ring", "zigzag"),
)
SHARDED_BATCH, SHARDED_TOKENS = 4, 4096
SHARDED: Final = {"batch": ("x",), "heads": (None, None, "x")}  # what a mesh axis splits, and its PartitionSpec
SECONDS: Final = 0.25  # of measuring one function
ARGUMENT = argparse.ArgumentParser(description="attention whose rows are split over GPUs, in milliseconds")


def measure(jax: Any, function: Callable[..., Any], *arrays: Any) -> float:
    """Returns milliseconds per call: the median of five samples in SECONDS, or of two calls that take longer."""
    jax.block_until_ready(function(*arrays))
    start = time.perf_counter()
    jax.block_until_ready(function(*arrays))
    calls = max(1, int(SECONDS / 5 / (time.perf_counter() - start)))
    found = []
    for _ in range(5 if calls > 1 else 2):
        start = time.perf_counter()
        for _ in range(calls):
            result = function(*arrays)
        jax.block_until_ready(result)
        found.append((time.perf_counter() - start) / calls * 1e3)
    return statistics.median(found)


def both(jax: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the output and the gradients of query, key and value."""

    def run(query: Any, key: Any, value: Any, grad_output: Any) -> Any:
        output, pull = jax.vjp(function, query, key, value)
        return output, pull(grad_output)

    return run


def forward(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function of the same arguments as `both` that computes the output alone."""
    return lambda query, key, value, _: function(query, key, value)


def operands(jax: Any, tokens: int, sharding: Any, batch: int = 1) -> tuple[Any, ...]:
    """Returns query, key, value and the gradient of the output, created where they are needed."""

    def create() -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(0), 4)
        shapes = [(batch, tokens, heads, HEAD_DIM) for heads in (HEADS, HEADS_KEY, HEADS_KEY, HEADS)]
        return tuple(jax.random.normal(key, shape, "bfloat16") for key, shape in zip(keys, shapes, strict=True))

    found: tuple[Any, ...] = jax.jit(create, out_shardings=sharding)()
    return found


def functions(jax: Any, attention: Callable[..., Any], devices: int) -> tuple[Any, dict[str, Callable[..., Any]]]:
    """Returns the mesh, and by name every function of query, key and value that splits their rows."""
    mesh = mesh_of(jax, devices, "Auto")
    spec = jax.sharding.PartitionSpec(None, "x")
    sharded = functools.partial(jax.shard_map, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)
    found = {}
    for strategy, order in SPLITS:
        call = functools.partial(attention, context_axis="x", context_strategy=strategy, load_balance=order)
        found[f"{strategy}{', zigzag' if order else ''}"] = sharded(call)

    def gathered(*arrays: Any) -> Any:
        whole = (jax.lax.all_gather(array, "x", axis=1, tiled=True) for array in arrays)
        output, rows = cudnn(jax)(*whole), arrays[0].shape[1]
        return jax.lax.dynamic_slice_in_dim(output, jax.lax.axis_index("x") * rows, rows, 1)

    return mesh, {**found, "cuDNN, all-gather": sharded(gathered)}


def cudnn(jax: Any) -> Callable[..., Any]:
    """Returns causal attention by cuDNN."""
    return functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")


def rows(jax: Any, attention: Callable[..., Any], tokens: int, devices: int) -> list[dict[str, Any]]:
    """Returns a row for each function, and prints it."""
    mesh, split = functions(jax, attention, devices)
    alone = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    of_rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
    found: list[dict[str, Any]] = []
    for sharding, named in ((alone, {"one GPU": attention, "one GPU, cuDNN": cudnn(jax)}), (of_rows, split)):
        arrays = operands(jax, tokens, sharding)
        for name, function in named.items():
            row = {"tokens": tokens, "devices": 1 if sharding is alone else devices, "name": name}
            found.append(row | timed(jax, function, arrays))
            print(text(found[-1], found[0]), flush=True)
        del arrays
    return found


def sharded_rows(jax: Any, attention: Callable[..., Any], devices: int) -> list[dict[str, Any]]:
    """Returns a row for one GPU, and for each way to split batch or heads, and prints it."""
    alone = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    arrays = operands(jax, SHARDED_TOKENS, alone, SHARDED_BATCH)
    about = {"tokens": SHARDED_TOKENS, "batch": SHARDED_BATCH}
    found: list[dict[str, Any]] = []
    for name, function in (("one GPU", attention), ("one GPU, cuDNN", cudnn(jax))):
        found.append(about | {"devices": 1, "name": name} | timed(jax, function, arrays))
        print(text(found[-1], found[0]), flush=True)
    for split, spec in SHARDED.items():
        for name, kind, function in (
            (f"{split}, Auto", "Auto", attention),
            (f"{split}, Explicit", "Explicit", attention),
            (f"{split}, cuDNN", "Auto", cudnn(jax)),
        ):
            mesh = mesh_of(jax, devices, kind)
            sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
            placed = [jax.device_put(array, sharding) for array in arrays]
            with jax.set_mesh(mesh):
                found.append(about | {"devices": devices, "name": name} | timed(jax, function, placed))
            print(text(found[-1], found[0]), flush=True)
    return found


def mesh_of(jax: Any, devices: int, kind: str) -> Any:
    """Returns a mesh of one axis, x, of a type by its name."""
    types = (getattr(jax.sharding.AxisType, kind),)
    return jax.make_mesh((devices,), ("x",), axis_types=types, devices=jax.devices()[:devices])


def timed(jax: Any, function: Callable[..., Any], arrays: Any) -> dict[str, Any]:
    """Returns the times, and the memory; a time is None if the peer does not support the problem, or lacks memory."""
    row: dict[str, Any] = {}
    for field, run in (("forward", forward(function)), ("both", both(jax, function))):
        try:
            compiled = jax.jit(run).lower(*arrays).compile()
            if field == "both":
                row["memory_mib"] = temporary_mib(compiled)
            row[field] = round(measure(jax, compiled, *arrays), 3)
        except Exception as error:
            row[field] = None
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
    return row


def temporary_mib(compiled: Any) -> float | None:
    """Returns MiB of the temporary buffers on each device; None if XLA does not say."""
    found = compiled.memory_analysis()
    return None if found is None else round(found.temp_size_in_bytes / 2**20, 1)


def text(row: dict[str, Any], one: dict[str, Any]) -> str:
    """Returns a row as text, with the share of a perfect split."""
    words = [f"{row['tokens']:>7} {row['name']:<22}"]
    for field in ("forward", "both"):
        number = row[field]
        share = (
            "" if row is one or number is None or one[field] is None else f"{one[field] / row['devices'] / number:5.2f}"
        )
        words.append(f"{field} {'refused' if number is None else f'{number:9.3f}'} {share:5}")
    if row.get("memory_mib") is not None:
        words.append(f"{row['memory_mib']:9.1f} MiB")
    return " ".join(words) + (f" {row['error']}" if "error" in row else "")


def build(folder: Path, devices: int) -> None:
    """Compiles the kernels of all functions for an H100 or H200 into a folder."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    import jax

    from cutlass_py_attn import Causal
    from cutlass_py_attn.jax import attention
    from tests.gpu.hosts.test_jax_context import compiler_into

    attend = functools.partial(attention, mask=Causal(), kernels=compiler_into(folder), arch="sm_90a")
    _, split = functions(jax, attend, devices)
    for tokens in TOKENS:
        described = jax.eval_shape(lambda tokens=tokens: operands(jax, tokens, None))
        named: dict[str, Callable[..., Any]] = {"one GPU": attend, **split}
        for name, function in named.items():
            if "cuDNN" not in name:
                jax.jit(both(jax, function)).trace(*described).lower(lowering_platforms=("cuda",))
    build_sharded(jax, attend, devices)


def build_sharded(jax: Any, attend: Callable[..., Any], devices: int) -> None:
    """Compiles the kernels of one GPU, and of parts of batch and heads, which an Explicit mesh splits in the trace."""
    described = jax.eval_shape(lambda: operands(jax, SHARDED_TOKENS, None, SHARDED_BATCH))
    jax.jit(both(jax, attend)).trace(*described).lower(lowering_platforms=("cuda",))
    mesh = mesh_of(jax, devices, "Explicit")
    for spec in SHARDED.values():
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        placed = [jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding) for array in described]
        with jax.set_mesh(mesh):
            jax.jit(both(jax, attend)).trace(*placed).lower(lowering_platforms=("cuda",))


def expect_gpus(jax: Any, count: int) -> None:
    """Ends the program with one sentence if JAX sees fewer GPUs."""
    seen = sum(device.platform == "gpu" for device in jax.devices())
    if seen < count:
        sys.exit(f"bench_context measures {count} GPUs, and JAX sees {seen}: pass --devices, or install jax[cuda13]")


def main() -> int:
    """Measures, prints a table, and writes it to the file of --record."""
    ARGUMENT.add_argument("--kernels", type=Path, help="folder of prebuilt kernels")
    ARGUMENT.add_argument("--build", type=Path, metavar="FOLDER", help="compile the kernels into FOLDER and stop")
    ARGUMENT.add_argument("--devices", type=int, default=2)
    ARGUMENT.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    ARGUMENT.add_argument(
        "--record", type=Path, metavar="FILE", help='write the run to FILE, as its parts "jax" and "sharding"'
    )
    given = ARGUMENT.parse_args()
    if given.build:
        build(given.build, given.devices)
        return 0
    import jax

    expect_gpus(jax, given.devices)
    from cutlass_py_attn import Causal
    from cutlass_py_attn.artifact import Folder
    from cutlass_py_attn.bench import harness
    from cutlass_py_attn.jax import attention
    from tools.release import record

    kernels = Folder(given.kernels) if given.kernels else None
    attend = functools.partial(attention, mask=Causal(), kernels=kernels)
    about = {**record.about_run(), "commit": harness.commit(), "jax": jax.__version__}

    def put(part: str, found: list[dict[str, Any]]) -> None:
        if given.record:
            record.put_part(given.record, part, {**about, "rows": found})

    found: list[dict[str, Any]] = []
    for tokens in given.tokens:
        found += rows(jax, attend, tokens, given.devices)
        put("jax", found)
    put("sharding", sharded_rows(jax, attend, given.devices))
    return 0


if __name__ == "__main__":
    sys.exit(main())
