# SPDX-License-Identifier: Apache-2.0
# bench names the file system that is mounted where it measures, whatever the place is called
if ! unshare -rm true 2>/dev/null; then
    echo 'no file system can be mounted here'
    exit 77
fi
mkdir 'a b'
# shellcheck disable=SC2016
unshare -rm sh -c '
    mount -t tmpfs -o size=256m "some memory" "a b" || exit 77
    lastgood bench "a b" --size=32MiB --rounds=1 --tensors=3 --json=result.json >table || exit 1
    grep -o "^tmpfs on some memory" table
    find "a b"
'
status=$?
[ $status = 0 ] || exit $status
python3 -c 'import json; m = json.load(open("result.json"))["machine"]; print(m["file_system"], m["device"], m["device_model"])'
