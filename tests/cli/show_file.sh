# SPDX-License-Identifier: Apache-2.0
# show and verify take a single safetensors file, and name what else a file is
make_root a --steps=100
f=$(ls "$(folder a 100)"/shard-00001-model-*)
cp "$f" model.safetensors
run lastgood show model.safetensors
run lastgood show model.safetensors 'q.*'
run lastgood show model.safetensors 'zz*'
run lastgood show --json model.safetensors w
run lastgood verify model.safetensors
run lastgood verify --json model.safetensors
run lastgood verify "$f"
run lastgood verify -q model.safetensors
truncate -s 5000 model.safetensors
run lastgood verify model.safetensors
run lastgood verify --json model.safetensors
printf 'version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n' >lfs.safetensors
printf 'PK\003\004aaaaaaaaaaaaaaaaaaaaaaaa' >zip.safetensors
: >empty.safetensors
for bad in lfs zip empty gone; do
    run lastgood show $bad.safetensors
    run lastgood verify $bad.safetensors
done
run lastgood get "$f" w
run lastgood pin "$f"
