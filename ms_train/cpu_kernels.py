"""Builds `cpu_kernels.cc` for this machine and wraps its functions as MindSpore primitives.

The library is built once into the user's cache folder, under a name that is a hash of everything it depends
on: source, flags, compiler, the processor's instruction set and the MindSpore wheel whose oneDNN it calls.
"""

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import mindspore as ms
from mindspore import ops

SOURCE = Path(__file__).with_name("cpu_kernels.cc")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fPIC",
         "-shared")
BUILD_SECONDS = 300


class Unavailable(Exception):
    """The kernels cannot be built or loaded here; the message says why."""


# ------------------------------------------------------------------------------ the library

@functools.cache
def library() -> Path:
    """The path of the built and loaded library. Raises `Unavailable`."""
    command = _command()
    path = _cache_folder() / f"cpu_kernels-{_key(command)}.so"
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError:  # absent, or damaged: build it, replacing what is there
        _build(command, path)
        try:
            loaded = ctypes.CDLL(str(path))
        except OSError as error:
            raise Unavailable(f"the built library does not load: {error}") from error
    loaded.set_threads(threads())
    return path


def threads() -> int:
    """Threads of a process: OMP_NUM_THREADS, else this machine's share of each worker that msrun started."""
    given = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if given.isdigit() and int(given) > 0:
        return int(given)
    workers = os.environ.get("MS_WORKER_NUM", "")
    return max(1, len(os.sched_getaffinity(0)) // max(1, int(workers) if workers.isdigit() else 1))


def _compiler() -> list[str]:
    given = shlex.split(os.environ.get("CXX", ""))
    for command in ([given] if given else [["g++"], ["c++"], ["clang++"]]):
        if shutil.which(command[0]):
            return command
    raise Unavailable(f"no C++ compiler ({given[0] if given else 'g++, c++ or clang++'})")


def _command() -> list[str]:
    """The compiler's command line, without the output; links the oneDNN that MindSpore itself loads."""
    onednn = Path(ms.__file__).parent / "lib" / "libdnnl.so.3"
    if not onednn.is_file():
        raise Unavailable(f"this MindSpore has no {onednn}")
    link = (f"-L{onednn.parent}", f"-l:{onednn.name}", f"-Wl,-rpath,{onednn.parent}")
    return [*_compiler(), *FLAGS, str(SOURCE), *link]


def _key(command: list[str]) -> str:
    """A hash of what the library depends on. The macros tell compiler, version and instruction set."""
    macros = _run([*_compiler(), *FLAGS, "-E", "-dM", "-x", "c++", os.devnull]).stdout
    settings = [word for word in command if word != str(SOURCE)] + [ms.__version__]
    parts = (SOURCE.read_bytes(), macros, repr(settings).encode())
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:24]


def _cache_folder() -> Path:
    try:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(root) / "deepseek-twins"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
        raise Unavailable(f"no cache folder: {error}") from error
    return folder


def _build(command: list[str], path: Path) -> None:
    """Several processes may build at once: the result appears under its name in one step."""
    try:
        with tempfile.TemporaryDirectory(prefix=".build-", dir=path.parent) as folder:
            made = Path(folder) / path.name
            done = _run([*command, "-o", str(made)])
            if done.returncode != 0:
                lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
                reason = next((line for line in lines if "error" in line), lines[-1])
                raise Unavailable(f"{command[0]} failed: {reason}")
            os.replace(made, path)
    except OSError as error:
        raise Unavailable(f"cannot write {path.parent}: {error}") from error


def _run(command: list[str]) -> subprocess.CompletedProcess:
    try:
        return subprocess.run(command, capture_output=True, timeout=BUILD_SECONDS, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]} failed: {error}") from error


# ------------------------------------------------------------------------------ primitives
# One primitive per kernel in a process. `inputs` and `outputs` give the element types, f fp32 and i int32;
# `shapes` maps the shapes of the inputs to those of the outputs.

_TYPES = {"f": ms.float32, "i": ms.int32}


def _primitive(symbol: str, inputs: str, outputs: str, shapes, bprop=None) -> ops.Custom:
    made = tuple(_TYPES[letter] for letter in outputs)

    def types(*given):
        for position, (letter, have) in enumerate(zip(inputs, given, strict=True)):
            if have.element_type() != _TYPES[letter]:
                raise TypeError(f"CPU kernel {symbol} computes in fp32: argument {position} must be "
                                f"{_TYPES[letter]}, got {have}")
        return made if len(made) > 1 else made[0]

    return ops.Custom(f"{library()}:{symbol}", shapes, types, func_type="aot", bprop=bprop)


@functools.cache
def linear() -> ops.Custom:
    backward = _primitive("linear_backward", "fff", "ff", lambda dy, x, w: (x, w))

    def bprop(x, w, out, dout):
        grads = backward(dout, x, w)
        return grads[0], grads[1]

    return _primitive("linear_forward", "ff", "f", lambda x, w: (*x[:-1], w[0]), bprop)


@functools.cache
def rms_norm() -> ops.Custom:
    """(x, w, eps [1])"""
    backward = _primitive("rms_norm_backward", "ffff", "ff", lambda dy, x, w, eps: (x, w))

    def bprop(x, w, eps, out, dout):
        grads = backward(dout, x, w, eps)
        return grads[0], grads[1], ops.zeros_like(eps)

    return _primitive("rms_norm_forward", "fff", "f", lambda x, w, eps: x, bprop)


@functools.cache
def rotary() -> ops.Custom:
    """(x, cos, sin, sign [1]); sign 1 turns forward, -1 back"""
    back = _primitive("rotary", "ffff", "f", lambda x, cos, sin, sign: x)

    def bprop(x, cos, sin, sign, out, dout):
        return back(dout, cos, sin, -sign), ops.zeros_like(cos), ops.zeros_like(sin), ops.zeros_like(sign)

    return _primitive("rotary", "ffff", "f", lambda x, cos, sin, sign: x, bprop)


@functools.cache
def attention() -> ops.Custom:
    """(q, k, v, segment_ids, options [2]) -> (y, stats); options: scale, window (0: none)"""
    backward = _primitive("attention_backward", "ffffifff", "fff",
                          lambda dy, q, k, v, segments, options, y, stats: (q, k, v))

    def bprop(q, k, v, segments, options, out, dout):
        grads = backward(dout[0], q, k, v, segments, options, out[0], out[1])
        return grads[0], grads[1], grads[2], ops.zeros_like(segments), ops.zeros_like(options)

    def shapes(q, k, v, segments, options):
        return (*q[:3], v[3]), (q[0], q[2], q[1], 2)

    return _primitive("attention_forward", "fffif", "ff", shapes, bprop)


@functools.cache
def swiglu() -> ops.Custom:
    backward = _primitive("swiglu_backward", "fff", "ff", lambda dy, gate, up: (gate, up))

    def bprop(gate, up, out, dout):
        grads = backward(dout, gate, up)
        return grads[0], grads[1]

    return _primitive("swiglu_forward", "ff", "f", lambda gate, up: gate, bprop)


@functools.cache
def routed_experts() -> ops.Custom:
    """(x, slots, weights, gate_up, down) -> (y, and what backward needs)"""
    backward = _primitive("routed_experts_backward", "fffffiif", "ffff",
                          lambda dy, x, weights, gate_up, down, order, starts, h: (x, weights, gate_up, down))

    def bprop(x, slots, weights, gate_up, down, out, dout):
        grads = backward(dout[0], x, weights, gate_up, down, out[1], out[2], out[3])
        return grads[0], ops.zeros_like(slots), grads[1], grads[2], grads[3]

    def shapes(x, slots, weights, gate_up, down):
        pairs = slots[0] * slots[1] if slots[0] > 0 else -1  # -1: not known yet
        return x, (pairs,), (gate_up[0] + 1,), (pairs, gate_up[1])

    return _primitive("routed_experts_forward", "fifff", "fiif", shapes, bprop)


# Two primitives of one name are one to MindSpore's inference, which remembers results by name and inputs: a width
# that only their Python function knows gets mixed up (seen inside a while loop). So it comes with an input.


@functools.cache
def top_k() -> ops.Custom:
    """(scores, places [k]); `places` gives k by its length"""
    return _primitive("top_k", "fi", "i", lambda scores, places: (scores[0], places[0]))


@functools.cache
def chosen_mask() -> ops.Custom:
    """(indices, columns [n]); `columns` gives n by its length"""
    return _primitive("chosen_mask", "ii", "f", lambda indices, columns: (indices[0], columns[0]))


@functools.cache
def cross_entropy_sum() -> ops.Custom:
    """(logits, labels) -> (loss [1], stats)"""
    backward = _primitive("cross_entropy_backward", "ffif", "f", lambda dloss, logits, labels, stats: logits)

    def bprop(logits, labels, out, dout):
        return backward(dout[0], logits, labels, out[1]), ops.zeros_like(labels)

    def shapes(logits, labels):
        return (1,), (logits[0], 2)

    return _primitive("cross_entropy_forward", "fi", "ff", shapes, bprop)


@functools.cache
def sum_of_squares() -> ops.Custom:
    """x -> [1]"""
    return _primitive("sum_of_squares", "f", "f", lambda x: (1,))
