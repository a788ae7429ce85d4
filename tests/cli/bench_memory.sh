# SPDX-License-Identifier: Apache-2.0
# bench counts the memory that its process may have, and what killed ones left
if grep -qE '__[at]san_init' "$LASTGOOD_CLI" || [ "${LASTGOOD_PROVE:-}" = brief ]; then
    echo 'a sanitizer, or valgrind, needs more address space than the limit leaves'
    exit 77
fi
mkdir b
bench() {
    (
        ulimit -v 1000000
        lastgood bench b "$@" 2>&1 | sed -E 's/[0-9.]+ [MG]iB/SIZE/g; s/=[0-9]+MiB/=N/'
    )
}
bench --size=512MiB
find b
# By itself it takes less.
bench --rounds=1 --tensors=3 | grep -E 'instead|in 3 tensors'
mkdir b/.lastgood-bench-killed
bench --size=512MiB | grep killed
find b
