# SPDX-License-Identifier: Apache-2.0
# an empty root, a path that is not there and a file are told apart
mkdir empty
echo x >file
run lastgood ls empty
run lastgood ls -a empty
run lastgood ls --json empty
run lastgood ls emty
run lastgood ls no/such/folder
run lastgood ls file
run lastgood show empty
run lastgood verify empty
run lastgood prune empty --keep-last=1
run lastgood rollback empty
