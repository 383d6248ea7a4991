"""Reference page: griffe reads the docstrings of the public names, griffe2md writes them as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any, Final

from griffe import Docstring, Function, GriffeLoader, Module, Parameter, ParameterKind, Parameters
from griffe2md import ConfigDict, render_object_docs

PACKAGE: Final = "cutlass_py_attn"
HEAD: Final = """# Reference

Every public name with its signature and docstring. `tools/docs/generate.py` writes this page from the source.
"""
# What users call; the rest is for those who plan, compile, launch or extend themselves.
FRONT: Final = (
    *("attention_forward", "attention_backward", "mla_attention_forward"),
    *("Causal", "CausalBottomRight", "Window", "VariableLength", "Paged", "Dropout"),
    *("append_to_cache", "merge_states", "quantize_e4m3"),
    *("Problem", "Shape", "plan_forward", "plan_backward", "artifact_for", "Folder", "export_library", "NotSupported"),
)
SECTIONS: Final = {
    "Attention": ("attention_forward", "attention_backward", "AttentionOptions", "ForwardOptions", "BackwardOptions",
                  "Gradients", "Dropout", "dropout_mask", "VariableLength", "Paged"),
    "Masks": ("Mask", "Full", "Causal", "CausalBottomRight", "Window"),
    "Paged caches and partial results": ("append_to_cache", "merge_states", "AppendProblem", "MergeProblem",
                                         "plan_append", "plan_merge"),
    "Problem and plan": ("Problem", "Shape", "Tensor", "Sequences", "Pages", "Plan", "plan_forward", "plan_backward",
                         "plan_with_tile", "TileConfig"),
    "Compile and launch": ("Build", "compile", "artifact_for", "Artifact", "Folder", "bind", "Bound"),
    "Bundles": ("export_bundle", "export_library", "load_bundle", "Bundle"),
    "Errors": ("AttentionError", "NotSupported", "DoesNotFit", "CompileError", "Stale", "NoDevice", "OldDriver",
               "ForkedChild", "DriverError", "NoPermission"),
}  # fmt: skip
REST: Final = "Other names"
DISTRIBUTED: Final = "[Several GPUs without JAX](distributed.md) explains its use."
CONFIG: Final[ConfigDict] = {
    "heading_level": 3,
    "show_root_full_path": False,
    "show_root_members_full_path": False,
    "show_object_full_path": False,
    "show_signature_annotations": True,
    "show_if_no_docstring": False,  # dataclass fields are in the signature
    "show_bases": False,
    "inherited_members": False,
    "members_order": "source",
    "filters": ["!^_", "^__call__$"],
    "line_length": 110,
    "summary": False,
}
PARAMETER: Final = re.compile(r"(?P<names>\w+(?:, \w+)*): ")


def reference() -> str:
    """Returns the page."""
    package = load()
    return "\n".join([HEAD, *_front(package), *_sections(package)])


def load() -> Module:
    """Returns the package as griffe reads it from its source; imports nothing of it."""
    loader = GriffeLoader()
    package = loader.load(PACKAGE)
    loader.resolve_aliases()
    if not isinstance(package, Module):
        raise TypeError(f"{PACKAGE} is a {type(package).__name__}, must be a package")
    return package


def exports(module: Any) -> list[str]:
    """Returns the names in a module's `__all__`, or those that it imports lazily; sorted without regard to case."""
    lazy = (name for name, path in module.imports.items() if path.startswith(f"{PACKAGE}.") and path.count(".") > 1)
    return sorted(map(str, module.exports or lazy), key=str.lower)


def _front(package: Module) -> Iterator[str]:
    """Yields the table of the names of FRONT, with the first sentence of each docstring."""
    yield f"The {len(FRONT)} names that programs call:\n"
    yield "| name | |"
    yield "| --- | --- |"
    for name in FRONT:
        target = package[name].final_target if package[name].is_alias else package[name]
        summary = " ".join(target.docstring.value.partition("\n\n")[0].split()).replace("|", "\\|")
        yield f"| [`{name}`](#{name.lower()}) | {summary} |"
    yield ""


def _sections(package: Module) -> Iterator[str]:
    listed = {name for names in SECTIONS.values() for name in names}
    rest = tuple(name for name in exports(package) if name not in listed)
    for title, names in {**SECTIONS, **({REST: rest} if rest else {})}.items():
        yield f"## {title}\n"
        yield from _entries(package[name] for name in names)
    torch_ops = package["torch_ops"]
    yield f"## PyTorch's entry points\n\n`{PACKAGE}.torch_ops`. {_summary(torch_ops)}\n"
    yield from _entries(torch_ops[name] for name in exports(torch_ops))
    jax = package["jax"]
    yield f"## JAX\n\n`{PACKAGE}.jax`, which needs the extra `jax`. [JAX](jax.md) explains its use.\n"
    yield from _entries(jax[name] for name in exports(jax))
    distributed = package["distributed"]
    yield f"## Several GPUs without JAX\n\n`{PACKAGE}.distributed`, which needs the extra `nccl`. {DISTRIBUTED}\n"
    yield from _entries(distributed[name] for name in exports(distributed))


def _entries(objects: Iterable[Any]) -> Iterator[str]:
    for found in objects:
        target = found.final_target if found.is_alias else found
        if isinstance(target, Function):
            _show_options(target)
        for documented in (target, *target.members.values()):
            if not documented.is_alias and documented.docstring:
                documented.docstring = _with_lists(documented.docstring, documented)
        # The documentation's tests run blocks of Python, and a signature is no program.
        yield render_object_docs(target, CONFIG).strip().replace("```python\n", "```python signature\n") + "\n"


def _show_options(function: Function) -> None:
    """Puts the keywords that help() shows in place of the `**options` of a function that `takes_options` decorates."""
    called = getattr(import_module(function.module.path), function.name)
    if hasattr(called, "__signature__"):
        function.parameters = Parameters(
            *(
                Parameter(
                    name,
                    annotation=shown.annotation,
                    kind=ParameterKind[shown.kind.name.lower()],
                    default=None if shown.default is shown.empty else repr(shown.default),
                )
                for name, shown in called.__signature__.parameters.items()
            )
        )


def _with_lists(docstring: Docstring, documented: Any) -> Docstring:
    """Makes a Markdown list of the lines `name: meaning` that describe parameters or fields."""
    known = {parameter.name for parameter in getattr(documented, "parameters", ())} | set(documented.all_members)
    lines = []
    for line in docstring.value.splitlines():
        match = PARAMETER.match(line)
        if match and known.issuperset(match["names"].split(", ")):
            names = ", ".join(f"`{name}`" for name in match["names"].split(", "))
            line = f"- {names}: {line[match.end() :]}"
        lines.append(line)
    return Docstring("\n".join(lines), parent=documented)


def _summary(module: Any) -> str:
    _, _, sentence = module.docstring.value.splitlines()[0].partition(": ")
    return str(sentence[:1].upper() + sentence[1:])
