# SPDX-License-Identifier: Apache-2.0
# Helpers of the command-line tests; sourced by run.
set -u

# Prints a command, what it says, and its exit status unless that is 0.
run() {
    echo "\$ $*"
    "$@" 2>&1
    status=$?
    [ $status = 0 ] || echo "exit $status"
}

# The same without standard error.
quietly() {
    echo "\$ $*"
    "$@" 2>/dev/null
    status=$?
    [ $status = 0 ] || echo "exit $status"
}

# flip FILE OFFSET: one bit of one byte.
flip() {
    byte=$(od -An -tu1 -j"$2" -N1 "$1")
    printf "\\$(printf %o $((byte ^ 1)))" | dd of="$1" bs=1 seek="$2" conv=notrunc 2>/dev/null
}

# The step folder of a step: folder ROOT STEP
folder() { ls -d "$1"/step-*"$2".g* | head -n 1; }

# Fails the test, with a reason.
fail() {
    echo "FAILED: $*"
    exit 1
}

# no_control FILE: no control bytes but newlines, no C1 characters in UTF-8.
no_control() {
    if LC_ALL=C grep -q "$(printf '[\001-\010\013-\037\177]')" "$1" || LC_ALL=C grep -q "$(printf '\302[\200-\237]')" "$1"; then
        fail "$1 has control bytes"
    fi
}

# checksummed FROM TO: a manifest with the checksum that belongs to what it says.
checksummed() {
    python3 - "$1" "$2" <<'PYTHON'
import pathlib
import sys
body = pathlib.Path(sys.argv[1]).read_bytes()[21:]
crc = 0xFFFFFFFF
for byte in body:
    crc ^= byte
    for _ in range(8):
        crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
pathlib.Path(sys.argv[2]).write_bytes(b'{"crc32c":"%08x",' % (crc ^ 0xFFFFFFFF) + body)
PYTHON
}

# newer MANIFEST: makes it one of format 2.0.
newer() {
    chmod u+w "$1"
    sed 's/"version":\[1,0\]/"version":[2,0]/' "$1" >newer.json
    checksummed newer.json "$1"
    rm newer.json
}

# Someone who is not root, to whom files can be forbidden.
ordinary() {
    if [ "$(id -u)" = 0 ]; then
        setpriv --reuid=65534 --regid=65534 --clear-groups "$@"
    else
        "$@"
    fi
}
