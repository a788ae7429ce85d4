# SPDX-License-Identifier: Apache-2.0
# bench names what it cannot remove, and does not say that it has
chmod 755 .. .
if ! ordinary lastgood --version >/dev/null 2>&1; then
    echo 'cannot become an ordinary user who may run lastgood'
    exit 77
fi
mkdir here
chmod 777 here
python3 - <<'PYTHON'
import os
import pathlib
import signal
import subprocess
import time

here = pathlib.Path("here")
user = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
process = subprocess.Popen(["lastgood", "bench", "here", "--size=64MiB", "--rounds=100"], stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, text=True, **user)
deadline = time.monotonic() + 300
while not any(here.glob(".lastgood-bench-*/checkpoints/*step-*")):
    assert process.poll() is None, process.communicate()
    assert time.monotonic() < deadline, "it never began"
    time.sleep(0.002)
child = int(pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
os.kill(child, signal.SIGSTOP)
folder = next(here.glob(".lastgood-bench-*"))
folder.chmod(0o500)
os.kill(child, signal.SIGKILL)
_, errors = process.communicate(timeout=300)
print(f"exit {process.returncode}", errors.replace(folder.name, "FOLDER").strip())
print(sorted(str(p.relative_to(folder)) for p in folder.iterdir()))
folder.chmod(0o700)
PYTHON
