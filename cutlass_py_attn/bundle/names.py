"""Names of bundles: the prefix of the C functions, which is also the name of a header, a library and a Rust crate.

A name is refused if a file or a target of that name would hide another one, or if a tool takes it for a word of its
own: then programs that include, link or build the export fail.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from cutlass_py_attn.refusals import Refusal, refuse


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
_MOST: Final = 64  # characters, so that every file and function has a name that all tools take

# Headers of C, C++, POSIX, Linux, macOS and CUDA that programs include, or that these include.
_HEADERS: Final = _words(
    """
    aio aliases alloca ar argp argz assert assertion availability byteswap cet complex cpio cpuid crypt ctype cuda
    cudart curses device_types dirent dispatch dlfcn driver_types elf endian envz err errno error execinfo expat fcntl
    features fenv float fmtmsg fnmatch fpu_control fstab fts ftw gconv getopt glob gnu grp gshadow host_config
    host_defines iconv idn2 ifaddrs immintrin intrin inttypes io iso646 langinfo lastlog libgen libintl limits link
    locale mach malloc math mcheck memory mntent monetary mqueue netdb nl_types nss nvml nvrtc obstack omp paths
    poll printf process proc_service pthread pty pwd re_comp regex regexp resolv sal sched search semaphore setjmp sgtty
    shadow signal spawn stab stdalign stdarg stdatomic stdbit stdbool stdckdint stddef stdfix stdint stdio stdio_ext
    stdlib stdnoreturn strings string syscall sysexits syslimits syslog tar termio termios tgmath thread_db threads time
    ttyent uchar ucontext ulimit unistd unwind utime utmp utmpx values varargs vector_types version wait wchar wctype
    windows winsock winsock2 wordexp xlocale yvals
    """
)
_LIBRARIES: Final = _words(
    """
    anl asan atomic bsd c cublas cudadevrt cudart_static cudnn dl gcc gcc_eh gcc_s gomp lsan m mvec nccl nsl nvidia
    nvptxcompiler_static objc pthread_nonshared quadmath rt ssp stdc supc system tsan ubsan util
    """
)
_C_KEYWORDS: Final = _words(
    """
    alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t char32_t char8_t class co_await
    co_return co_yield compl concept const const_cast consteval constexpr constinit continue decltype default delete do
    double dynamic_cast else enum explicit export extern false float for friend goto if inline int long mutable
    namespace new noexcept not not_eq nullptr operator or or_eq private protected public register reinterpret_cast
    requires restrict return short signed sizeof static static_assert static_cast struct switch template this
    thread_local throw true try typedef typeid typename typeof typeof_unqual union unsigned using virtual void volatile
    wchar_t while xor xor_eq linux unix i386
    """
)
_RUST_NAMES: Final = _words(
    """
    abstract alloc as async await become box build core crate deps dyn examples final fn gen impl in incremental let
    loop macro match mod move mut override priv proc_macro pub ref self std super test trait type unsafe unsized use
    where yield
    """
)
_TARGETS: Final = _words(
    """
    all all_build clean continuous depend distclean edit_cache experimental help install install_local
    install_strip list_install_components nightly package package_source preinstall rebuild_cache run_tests
    zero_check
    """
)
_DEVICES: Final = frozenset(
    ["aux", "con", "nul", "prn", *(f"{kind}{number}" for kind in ("com", "lpt") for number in range(10))]
)
_TAKEN: Final = {
    "a header that C programs include": _HEADERS,
    "a library of the system or of CUDA": _LIBRARIES,
    "a keyword of C or C++, or a macro of its compilers": _C_KEYWORDS,
    "a keyword of Rust, or a name that cargo keeps": _RUST_NAMES,
    "a target of CMake or make": _TARGETS,
    "a device on Windows": _DEVICES,
}


def name_refusals(name: str) -> Iterator[Refusal]:
    """Yields why a bundle cannot have this name."""
    if not _NAME.fullmatch(name):
        rule = "must be lower-case letters, digits and _, as the prefix of C functions"
        yield refuse("name", name, rule, "correct it")
    elif len(name) > _MOST:
        yield refuse("name", name, f"must have at most {_MOST} characters, and has {len(name)}", "shorten it")
    elif kinds := [kind for kind, taken in _TAKEN.items() if name in taken]:
        rule = f"must not be that of {', nor of '.join(kinds)}"
        yield refuse("name", name, rule, f"choose another, such as my_{name}")
