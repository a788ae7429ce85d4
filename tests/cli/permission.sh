# SPDX-License-Identifier: Apache-2.0
# K19: what may not be read is not called damaged
make_root a --steps=100,200,300
chmod 755 .. .
if ! ordinary lastgood --version >/dev/null 2>&1; then
    echo 'cannot become an ordinary user who may run lastgood'
    exit 77
fi
chmod -R a+rX a
chmod 0 "$(folder a 200)"/shard-00001-model-*
run ordinary lastgood verify a
run ordinary lastgood verify --json a@200 | grep -e result -e status
flip "$(folder a 200)"/config.json 3
run ordinary lastgood verify a@200
chmod 0 "$(folder a 300)"
run ordinary lastgood ls a
run ordinary lastgood show a
run ordinary lastgood verify a
run ordinary lastgood get a@100 w 0,0
mkdir shut
chmod 0 shut
run ordinary lastgood ls shut/a
chmod 755 shut
mkdir closed
chmod 555 closed
run ordinary lastgood bench closed --size=32MiB
find closed
# Two of them say it in one sentence.
chmod 0 "$(folder a 100)"/shard-00002-model-* "$(folder a 100)"/config.json
run ordinary lastgood verify a@100
