# SPDX-License-Identifier: Apache-2.0
# colours and the progress bar are for terminals only, and NO_COLOR turns colours off
command -v script >/dev/null || { echo 'script is not there'; exit 77; }
make_root a --steps=100,200
esc=$(printf '\033')
shows() { if grep -q "$1" "$2"; then echo "$3: yes"; else echo "$3: no"; fi; }
unset NO_COLOR
lastgood ls a >plain
shows "$esc" plain 'colour in a pipe'
lastgood ls --color=always a >always
shows "$esc" always 'colour with --color=always'
script -qec 'lastgood ls a' /dev/null >tty </dev/null
shows "$esc" tty 'colour on a terminal'
NO_COLOR=1 script -qec 'lastgood ls a' /dev/null >tty </dev/null
shows "$esc" tty 'colour with NO_COLOR'
TERM=dumb script -qec 'lastgood ls a' /dev/null >tty </dev/null
shows "$esc" tty 'colour on a dumb terminal'
script -qec 'lastgood ls --color=never a' /dev/null >tty </dev/null
shows "$esc" tty 'colour with --color=never'
lastgood verify a@100 2>pipe
shows '%' pipe 'progress in a pipe'
script -qec 'lastgood verify a@100' /dev/null >tty </dev/null
shows '%.* of .* left' tty 'progress on a terminal'
# The bar is gone at the end: the last thing before the result clears its line.
tr '\r' '\n' <tty | grep -q "^${esc}\[Kstep 100 (g1.1): " && echo 'the bar was cleared'
script -qec 'lastgood verify -q a@100' /dev/null >tty </dev/null
shows '%' tty 'progress with --quiet'
# What takes long says so at once, and bytes are not for people.
script -qec 'lastgood prune --keep-last=1 a' /dev/null >tty </dev/null
shows 'verifying the newest checkpoint that stays' tty 'prune on a terminal'
lastgood prune --keep-last=1 a >/dev/null 2>pipe
shows 'verifying' pipe 'prune in a pipe'
script -qec 'lastgood rm a@100' /dev/null >tty </dev/null
shows 'verifying another checkpoint before this one goes' tty 'rm on a terminal'
lastgood rm a@100 >/dev/null 2>pipe
shows 'verifying' pipe 'rm in a pipe'
script -qec 'lastgood get a@100 ids -o -' /dev/null >tty </dev/null
shows 'a .npy file is not for a terminal' tty 'an array to a terminal is refused'
shows 'NUMPY' tty 'an array on a terminal'
