# SPDX-License-Identifier: Apache-2.0
# bench removes what it wrote however it ends, and its memory is bounded (K07)
mkdir here
python3 - <<'PYTHON'
import os
import pathlib
import pty
import resource
import signal
import subprocess
import time

MIB = 1 << 20
here = pathlib.Path("here")


def start(*options, ignore=None, file_bytes=None, stderr=subprocess.PIPE):
    def before():  # what runs the tests may ignore some of them itself
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        if ignore is not None:
            signal.signal(ignore, signal.SIG_IGN)
        if file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))

    return subprocess.Popen(["lastgood", "bench", "here", *options], preexec_fn=before, stdout=subprocess.PIPE,
                            stderr=stderr, text=True)


def wait_until(what, process):
    deadline = time.monotonic() + 300
    while not what():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it never began"
        time.sleep(0.002)


def begun():
    """Something is being written, and a checkpoint is."""
    return any(here.glob(".lastgood-bench-*/raw")) and any(here.glob(".lastgood-bench-*/checkpoints/*step-*"))


def child_of(process):
    return int(pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


def told(process, *signals, child=False):
    wait_until(begun, process)
    for number in signals:
        os.kill(child_of(process) if child else process.pid, number)
    _, errors = process.communicate(timeout=300)
    left = sorted(str(p) for p in here.rglob("*"))
    print(f"exit {process.returncode}, left {left}", errors.strip())


for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
    told(start("--size=64MiB", "--rounds=100"), number)
print("ignored from the start (nohup)")
told(start("--size=64MiB", "--rounds=100", ignore=signal.SIGHUP), signal.SIGHUP, signal.SIGTERM)
print("the process that works is killed, as when memory runs out")
told(start("--size=64MiB", "--rounds=100"), signal.SIGKILL, child=True)
process = start("--size=64MiB", "--rounds=100", "--json")
wait_until(begun, process)
os.kill(child_of(process), signal.SIGKILL)
print(process.communicate(timeout=300)[0].strip())

print("out of space: the limit of a file's size stands for it")
process = start("--size=64MiB", "--rounds=1", ignore=signal.SIGXFSZ, file_bytes=16 * MIB)
_, errors = process.communicate(timeout=300)
print(f"exit {process.returncode}, left {sorted(here.rglob('*'))}", errors.split("/")[-1].strip())

print("on a terminal")
outer, inner = pty.openpty()
process = start("--size=32MiB", "--rounds=1", "--tensors=3", stderr=inner)
os.close(inner)
shown = b""
try:
    while part := os.read(outer, 65536):
        shown += part
except OSError:
    pass  # closed by the other side
process.communicate(timeout=300)
print(f"exit {process.returncode}", b"warming up: raw write" in shown, b"round 1 of 1: save" in shown,
      shown.endswith(b"\r\x1b[K"))

# The state, a copy for saving in the background, 64 MiB for transfers, and the program.
process = start("--size=256MiB", "--rounds=1")
process.communicate(timeout=300)
most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
program = pathlib.Path(os.environ.get("LASTGOOD_CLI", "/dev/null")).read_bytes()
sanitized = b"__asan_init" in program or b"__tsan_init" in program
in_valgrind = os.environ.get("LASTGOOD_PROVE") == "brief"
assert sanitized or in_valgrind or 256 * MIB < most < (2 * 256 + 64 + 64) * MIB, f"{most / MIB:.0f} MiB"
print("K07: the memory is that of the state, a copy and the buffers")
PYTHON
