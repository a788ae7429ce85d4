# SPDX-License-Identifier: Apache-2.0
# K19: control bytes in names and state never reach the terminal
make_root a --steps=100,200
bad=$(printf 'x\033[31m\nred')
echo x >"$(folder a 100)/$bad"
mkdir "a/$bad"
lastgood pin a@100 --reason "$bad"
lastgood rollback a@100 --reason "$bad" >/dev/null
printf '\377\376' >"a/$(printf 'latin\351')"
for command in 'ls -a' 'show' 'show -t' 'show -s' 'show -f' 'verify' 'ls -a --json' 'show --json -tfs'; do
    lastgood $command a >out 2>&1
    no_control out
done
lastgood ls "no $bad" >out 2>&1
no_control out
lastgood verify "a@$bad" >out 2>&1
no_control out
lastgood get a@100 "$bad" >out 2>&1
no_control out
lastgood get a@100 "$(printf 'evil\302\233')" >out 2>&1
no_control out
lastgood "$bad" >out 2>&1
no_control out
run lastgood ls -a a
run lastgood show a@100
run lastgood show a@100 'evil*'
run lastgood show -s a@100
run lastgood get a@100 "$(printf 'evil\302\23331m')"
