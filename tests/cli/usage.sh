# SPDX-License-Identifier: Apache-2.0
# mistakes get one line that helps, and exit status 2
mkdir runs
make_root runs/a --steps=100
lastgood --version | sed 's/[0-9.]*$/VERSION/'
for command in lss verfy remove check xyzzy --foo; do
    run lastgood $command runs/a
done
run lastgood help verfy
run lastgood verify
run lastgood verify --theads=3 runs/a
run lastgood verify -x runs/a
run lastgood verify --threads runs/a
run lastgood verify --quiet=1 runs/a
run lastgood verify runs/a runs/b
run lastgood ls --colour=no runs/a
run lastgood ls --color=red runs/a
run lastgood verify run/a
run lastgood verify runs/b@100
run lastgood verify runs/a@newest
run lastgood verify runs/a@100x
run lastgood verify "$(folder runs/a 100)@100"
run lastgood verify mem:x
run lastgood verify ''
run lastgood verify --json runs/b
run lastgood verify --jsno runs/a
lastgood 2>&1 >/dev/null | head -n 1
lastgood >/dev/null 2>&1
echo "exit $?"
lastgood ls runs/a 2>&1 >/dev/full
echo "exit $?"
for command in ls show verify rollback pin rm prune sweep get diff help; do
    lastgood help $command >one
    lastgood $command --help >two
    cmp one two && grep -q '^examples:' one && echo "help $command is $command --help"
done
for command in ls verify; do
    lastgood $command --version | sed 's/[0-9.]*$/VERSION/'
done
touch runs/file
run lastgood verify runs/file@100
run lastgood ls --bytes runs/a | sed 's/([0-9]*)/(N)/'
