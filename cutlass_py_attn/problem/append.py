"""AppendProblem: key and value rows of new tokens, stored in the pages of a cache, in its dtype or as scaled e4m3.

Slot s is row s % page_size of page s // page_size. A token whose slot is negative, or beyond the cache, is not stored.

In a latent cache of e4m3 codes, key_cache has the codes and value_cache the columns of the rotary embedding, in the
dtype of the rows. Its scales belong to each 128 columns of a row of key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import ClassVar, Final

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.integers import ceil_div
from cutlass_py_attn.problem.operands import Operand, named_strides
from cutlass_py_attn.problem.quantization import CACHE_SCALES, SCALE_COLUMNS
from cutlass_py_attn.problem.tensors import E4M3, ITEM_BYTES, Tensor
from cutlass_py_attn.problem.validation import memory_refusals, stride_refusals, tensor_refusals
from cutlass_py_attn.refusals import Refusal, one_of, refuse

MAX_HEAD_DIM: Final = 1024  # a few threads hold a whole row
MAX_ROWS: Final = 2**31 - 2**10  # rows of key, which the kernel counts in 32 bits up to the end of the last block
MAX_SLOTS: Final = 2**31 - 1  # rows of the cache
MAX_E4M3: Final = 448.0  # the largest finite e4m3 number
CACHES: Final = ("key_cache", "value_cache")
SCALES: Final = CACHE_SCALES
NO_SCALES, GIVEN_SCALES, ROW_SCALES, TILE_SCALES = "none", "given", "row", "tile"
_STRIDES: Final = ("page", "row", "head", "tile")
_POOL: Final = ("num_pages", "page_size", "num_heads_key")
_AXES: Final = {
    "key": ("tokens", "num_heads_key", "head_dim"),
    "value": ("tokens", "num_heads_key", "head_dim_value"),
    "key_cache": (*_POOL, "head_dim"),
    "value_cache": (*_POOL, "head_dim_value"),
    "slots": ("tokens",),
}
_FEATURES: Final[dict[str, tuple[str, ...]]] = {
    NO_SCALES: (),
    GIVEN_SCALES: ("e4m3_cache",),
    ROW_SCALES: ("e4m3_cache", "row_scales"),
    TILE_SCALES: ("e4m3_cache", "tile_scales"),
}


@dataclass(frozen=True, slots=True)
class AppendProblem:
    """The layouts of one `append_to_cache`.

    key: (tokens, num_heads_key, head_dim), float16, bfloat16 or float32
    value: (tokens, num_heads_key, head_dim_value), of the same dtype
    key_cache: (num_pages, page_size, num_heads_key, head_dim) in the dtype of key, or float8_e4m3fn, or uint8 for the
        bytes of e4m3 numbers
    value_cache: (num_pages, page_size, num_heads_key, head_dim_value), of the dtype of key_cache; in the dtype of value
        beside an e4m3 key_cache it belongs to a latent cache
    slots: (tokens,) int64
    key_scale, value_scale: float32, for an e4m3 cache alone. () or (1,), one scale, or (num_heads_key,), one of each
        head: they are read. (num_pages, page_size, num_heads_key), one of each stored row: they are written. A latent
        cache has key_scale alone: (num_pages, page_size, num_heads_key, ceil(head_dim / 128)), one of each 128 columns
        of a stored row, the last of which may be fewer: they are written.
    """

    key: Tensor
    value: Tensor
    key_cache: Tensor
    value_cache: Tensor
    slots: Tensor
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None

    direction: ClassVar = "append"

    @staticmethod
    def dense(
        key: tuple[int, int, int],
        pages: tuple[int, int],
        dtype: str,
        *,
        head_dim_value: int = 0,
        scales: str = NO_SCALES,
    ) -> AppendProblem:
        """Returns the problem of dense arrays, for example to compile its kernel before there are any.

        key: its shape (tokens, num_heads_key, head_dim). pages: (num_pages, page_size).
        head_dim_value: columns of value; 0 for head_dim.
        scales: NO_SCALES for a cache of `dtype`; GIVEN_SCALES, of each head, or ROW_SCALES for an e4m3 cache;
            TILE_SCALES for a latent cache.
        """
        tokens, heads, head_dim = key
        tiles = (*pages, heads, ceil_div(head_dim, SCALE_COLUMNS))
        shapes = {NO_SCALES: None, GIVEN_SCALES: (heads,), ROW_SCALES: (*pages, heads), TILE_SCALES: tiles}
        if scales not in shapes:
            raise NotSupported(refuse("scales", scales, one_of(shapes), "choose one"))
        shape = shapes[scales]
        scale = None if shape is None else Tensor.contiguous(shape, "float32")
        dims = head_dim, head_dim_value or head_dim
        caches = dtype if scales == NO_SCALES else E4M3[0], dtype if scales in (NO_SCALES, TILE_SCALES) else E4M3[0]
        key_rows, value_rows = (Tensor.contiguous((tokens, heads, columns), dtype) for columns in dims)
        key_cache, value_cache = (
            Tensor.contiguous((*pages, heads, columns), cache) for columns, cache in zip(dims, caches, strict=True)
        )
        slots = Tensor.contiguous((tokens,), "int64")
        value_scale = None if scales == TILE_SCALES else scale
        return AppendProblem(key_rows, value_rows, key_cache, value_cache, slots, scale, value_scale)

    @property
    def tokens(self) -> int:
        """Number of tokens, whose rows are stored."""
        return self.key.shape[0]

    @property
    def num_heads_key(self) -> int:
        """Number of heads of key and value."""
        return self.key.shape[1]

    @property
    def num_slots(self) -> int:
        """Number of rows of the cache, each of all heads."""
        return self.key_cache.shape[0] * self.key_cache.shape[1]

    @property
    def is_empty(self) -> bool:
        """Whether there is no row to store, or no row to store it in."""
        return 0 in (self.tokens, self.num_heads_key, self.num_slots)

    @property
    def scales(self) -> str:
        """NO_SCALES, or for a cache of e4m3 codes GIVEN_SCALES or ROW_SCALES, or TILE_SCALES if it is a latent one."""
        value = self.value_cache.dtype
        if self.key_cache.dtype in E4M3 and value not in E4M3 and value == self.value.dtype:
            return TILE_SCALES
        if self.key_scale is None:
            return NO_SCALES
        return ROW_SCALES if len(self.key_scale.shape) == 3 else GIVEN_SCALES

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the arrays that are written."""
        scales = {ROW_SCALES: SCALES, TILE_SCALES: ("key_scale",)}
        return (*CACHES, *scales.get(self.scales, ()))

    @property
    def dtype(self) -> str:
        """Element type of the new rows."""
        return self.key.dtype

    @property
    def features(self) -> tuple[str, ...]:
        """How rows are scaled, in the words of a C library's flags."""
        return _FEATURES[self.scales]

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that may differ between launches of one kernel, by name."""
        pages, page_size, heads, _ = self.key_cache.shape
        return {"tokens_k": self.tokens, "num_heads_key": heads, "page_size": page_size, "num_pages": pages}

    def operands(self) -> dict[str, Operand]:
        """Returns every array of a problem without objections by name."""
        operands = {}
        for name, tensor in self.tensors().items():
            if name in SCALES:
                operands[name] = self._scale(name, tensor)
            else:
                strides = named_strides(name, _strides_of(name), tensor.steps)
                operands[name] = Operand(name, tensor, _AXES[name], strides, name in self.outputs)
        return operands

    def _scale(self, name: str, tensor: Tensor) -> Operand:
        """Returns a scale with the axes of a pool, and stride 0 along those that it does not have."""
        has_tiles = self.scales == TILE_SCALES
        axes = _STRIDES if has_tiles else _STRIDES[:3]
        steps = *(0,) * (len(axes) - len(tensor.shape)), *tensor.steps
        shape = *self.key_cache.shape[:3], tensor.shape[-1] if has_tiles else 1
        whole = Tensor(shape, (*steps, 1)[: len(shape)], tensor.dtype, tensor.alignment)
        return Operand(name, whole, (*_POOL, "tiles"), named_strides(name, axes, steps), name in self.outputs)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors that the problem has, by name."""
        return {field.name: tensor for field in fields(self) if (tensor := getattr(self, field.name)) is not None}

    def refusals(self) -> list[Refusal]:
        """Returns every reason to refuse the problem: what was given, what is allowed, what to do."""
        wrong = [*_kinds(self)] or [*_ranks(self)]
        return wrong or [*_dtypes(self), *_shapes(self), *_scales(self), *_memory(self)]

    def reasons(self) -> list[str]:
        """Returns `refusals` as sentences."""
        return [*map(str, self.refusals())]

    def check(self) -> None:
        """Raises NotSupported with every reason to refuse the problem, if there is one."""
        if refusals := self.refusals():
            raise NotSupported(refusals)


def _strides_of(name: str) -> tuple[str, ...]:
    """Returns the names of the strides of an array whose columns are contiguous."""
    return _STRIDES if name in SCALES else _STRIDES[4 - len(_AXES[name]) : 3]


def _kinds(problem: AppendProblem) -> Iterator[Refusal]:
    for field in fields(problem):
        yield from tensor_refusals(field.name, getattr(problem, field.name), is_required=field.name in _AXES)


def _ranks(problem: AppendProblem) -> Iterator[Refusal]:
    for name, axes in _AXES.items():
        shape = getattr(problem, name).shape
        if len(shape) != len(axes):
            yield refuse(f"{name}.shape", shape, f"must be {_shown(axes)}", "reshape it")
    yield from stride_refusals(problem.tensors())


def _shown(axes: tuple[str, ...]) -> str:
    return f"({', '.join(axes)}{',' * (len(axes) == 1)})"


def _dtypes(problem: AppendProblem) -> Iterator[Refusal]:
    key, value, cache = problem.key.dtype, problem.value.dtype, problem.key_cache.dtype
    value_cache = problem.value_cache.dtype
    if key not in ITEM_BYTES:
        yield refuse("key.dtype", key, one_of(ITEM_BYTES), "cast it")
    if value != key:
        yield refuse("value.dtype", value, f"must be {key} as key", "cast one of them")
    if cache not in (key, *E4M3):
        rule = f"must be {key} as key, {E4M3[0]}, or uint8 for the bytes of e4m3 numbers"
        yield refuse("key_cache.dtype", cache, rule, "cast key and value, or allocate another cache")
    if cache in E4M3 and value_cache not in (cache, value):
        rule = f"must be {cache} as key_cache, or {value} as value for a latent cache"
        yield refuse("value_cache.dtype", value_cache, rule, "allocate another cache")
    elif cache not in E4M3 and value_cache != cache:
        yield refuse("value_cache.dtype", value_cache, f"must be {cache} as key_cache", "allocate one of them anew")
    if problem.slots.dtype != "int64":
        yield refuse("slots.dtype", problem.slots.dtype, "must be int64", "cast it")


def _shapes(problem: AppendProblem) -> Iterator[Refusal]:
    tokens, heads, head_dim = problem.key.shape
    head_dim_value, (pages, page_size) = problem.value.shape[2], problem.key_cache.shape[:2]
    sizes = dict(zip(_AXES["key"], problem.key.shape, strict=True))
    sizes |= {"head_dim_value": head_dim_value, "num_pages": pages, "page_size": page_size}
    for name, axes in _AXES.items():
        shape, wanted = getattr(problem, name).shape, tuple(sizes[axis] for axis in axes)
        if shape != wanted:
            yield refuse(f"{name}.shape", shape, f"must be {wanted} to match {_matched(name, problem)}", "reshape it")
    for label, size in (("head_dim", head_dim), ("head_dim_value", head_dim_value)):
        if not 1 <= size <= MAX_HEAD_DIM:
            yield refuse(label, size, f"must be from 1 to {MAX_HEAD_DIM}", "append slices of the columns")
    if page_size < 1:
        yield refuse("page_size", page_size, "must be at least 1", "allocate key_cache with rows in a page")
    if tokens * heads > MAX_ROWS:
        yield refuse("tokens * num_heads_key", tokens * heads, f"must be at most {MAX_ROWS}", "append in several calls")
    if problem.num_slots > MAX_SLOTS:
        yield refuse("num_pages * page_size", problem.num_slots, f"must be at most {MAX_SLOTS}", "use several caches")


def _matched(name: str, problem: AppendProblem) -> str:
    names = ("key", "value", "key_cache") if name == "value_cache" else ("key",)
    return ", ".join(f"{each} {getattr(problem, each).shape}" for each in names)


def _scales(problem: AppendProblem) -> Iterator[Refusal]:
    scales = {name: tensor for name in SCALES if (tensor := getattr(problem, name)) is not None}
    if problem.key_cache.dtype not in E4M3:
        for name, scale in scales.items():
            rule = f"only an e4m3 cache has scales, and key_cache has dtype {problem.key_cache.dtype}"
            yield refuse(name, scale, rule, "leave it out")
        return
    if problem.scales == TILE_SCALES:
        yield from _tile_scales(problem)
        return
    heads = problem.num_heads_key
    row_shape = (*problem.key_cache.shape[:2], heads)
    rule = f"must be float32 (), (1,), ({heads},) for given scales, or {row_shape} for computed ones"
    wrong = []
    for name in SCALES:
        scale = scales.get(name)
        if scale is None:
            wrong.append(refuse(name, None, f"{rule}, for an e4m3 cache", "pass it"))
        elif scale.dtype != "float32" or scale.shape not in ((), (1,), (heads,), row_shape):
            wrong.append(refuse(name, scale, rule, "reshape or cast it"))
    yield from wrong
    if not wrong and len({len(tensor.shape) == 3 for tensor in scales.values()}) == 2:
        rule = f"must be given, or computed for each row, as key_scale of shape {scales['key_scale'].shape}"
        yield refuse("value_scale", scales["value_scale"], rule, "pass two of a kind")


def _tile_scales(problem: AppendProblem) -> Iterator[Refusal]:
    """Yields why the scales are not those of a latent cache."""
    shape = (*problem.key_cache.shape[:2], problem.num_heads_key, ceil_div(problem.key.shape[2], SCALE_COLUMNS))
    scale, dtype = problem.key_scale, problem.value_cache.dtype
    if scale is None or scale.dtype != "float32" or scale.shape != shape:
        rule = (
            f"must be float32 {shape}, a computed scale of each {SCALE_COLUMNS} columns of a row, beside a "
            f"value_cache of {dtype}"
        )
        yield refuse("key_scale", scale, rule, "pass it" if scale is None else "reshape or cast it")
    if problem.value_scale is not None:
        rule = f"only e4m3 codes have scales, and value_cache has dtype {dtype}"
        yield refuse("value_scale", problem.value_scale, rule, "leave it out")


def _memory(problem: AppendProblem) -> Iterator[Refusal]:
    for name, tensor in problem.tensors().items():
        yield from memory_refusals(name, tensor, _strides_of(name), is_written=name in problem.outputs)
