# SPDX-License-Identifier: Apache-2.0
"""Writes the C source of lastgood._core with cffi.

The declarations come from the headers themselves, through the C preprocessor;
the compiler then checks them against the same headers, so that nothing is
declared by hand and nothing can drift.

    build_core.py OUTPUT COMPILER… -- HEADER…
"""

import re
import subprocess
import sys
from pathlib import Path

from cffi import FFI

# Macros with a plain number that Python wants by name.
NUMBERS = [
    "LG_MAX_NDIM",
    "LG_MAX_NAME",
    "LG_ERROR_MESSAGE_MAX",
    "LG_COMM_OPS_VERSION",
    "LG_KV_OPS_VERSION",
    "LG_NO_AXIS",
]

# Called by the library, implemented in Python (comm.py, background.py, session.py, saving.py, checkpoint.py, roots.py).
CALLBACKS = """
extern "Python" {
    lg_status lgpy_barrier(void *ctx, uint64_t deadline_ms, lg_error *err);
    lg_status lgpy_all_gather(void *ctx, const void *data, size_t bytes, void **all, size_t *sizes,
                              uint64_t deadline_ms, lg_error *err);
    lg_status lgpy_broadcast(void *ctx, void **data, size_t *bytes, uint32_t root, uint64_t deadline_ms,
                             lg_error *err);
    lg_status lgpy_all_to_all(void *ctx, const void *const *send, const size_t *send_bytes, void **recv,
                              size_t *recv_bytes, uint64_t deadline_ms, lg_error *err);
    void lgpy_destroy(void *ctx);
    lg_status lgpy_kv_set(void *ctx, const char *key, const void *data, size_t bytes, lg_error *err);
    lg_status lgpy_kv_get(void *ctx, const char *key, void **data, size_t *bytes, lg_error *err);
    lg_status lgpy_targets(lg_load *load, void *arg, lg_error *err);
    lg_status lgpy_fill(void *arg, lg_error *err);
    int lgpy_progress(uint64_t done, uint64_t total, void *arg);
    void lgpy_problem(const lg_problem *problem, void *arg);
    int lgpy_box(const lg_stored_box *box, void *arg);
    int lgpy_foreign(const char *name, void *arg);
    void lgpy_pruned(const lg_prune_item *item, void *arg);
    void lgpy_swept(const char *name, uint64_t bytes, void *arg);
}
void *malloc(size_t bytes);
"""


def declarations(compiler: list[str], headers: list[Path]) -> str:
    """The headers without system includes, macros and attributes."""
    text = "\n".join(h.read_text(encoding="utf-8") for h in headers)
    text = re.sub(r"^#include.*$", "", text, flags=re.M)
    command = [*compiler, "-E", "-P", "-x", "c", "-U__GNUC__", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    # cffi knows no digits' suffixes in enums.
    return re.sub(r"\b(\d+)u\b", r"\1", done.stdout)


def main() -> None:
    """Writes the file that the command line names."""
    output = Path(sys.argv[1])
    split = sys.argv.index("--")
    compiler, headers = sys.argv[2:split], [Path(p) for p in sys.argv[split + 1 :]]
    ffi = FFI()
    ffi.cdef(declarations(compiler, headers))
    ffi.cdef("\n".join(f"#define {name} ..." for name in NUMBERS))
    ffi.cdef(CALLBACKS)
    ffi.set_source("lastgood._core", '#include <lastgood/backend.h>\n#include <stdlib.h>\n#include "glue.h"\n')
    ffi.emit_c_code(str(output))


if __name__ == "__main__":
    main()
