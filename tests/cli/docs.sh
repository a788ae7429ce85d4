#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# docs/cli.md and the program agree: commands, options, exit statuses. Prints TAP.
set -u
here=$(cd "$(dirname "$0")" && pwd)
: "${LASTGOOD_CLI:=$here/../../build/cli/lastgood}"
page=${LASTGOOD_SOURCE:-$here/../..}/docs/cli.md
n=0
bad=0

# result SENTENCE PROBLEMS: one line of TAP; problems are what is wrong, or "".
result() {
    n=$((n + 1))
    if [ -z "$2" ]; then
        echo "ok $n - $1"
    else
        bad=1
        echo "not ok $n - $1"
        echo "$2" | sed 's/^/#   /'
    fi
}

# The section under a heading, up to the next of the same or a higher level.
section() { awk -v head="$1" '/^##? / { on = 0 } $0 == head { on = 1 } on' "$page"; }

options_of() { "$LASTGOOD_CLI" "$@" --help | grep -oE '^ +(-[a-z], )?--[a-z-]+' | grep -oE -- '--[a-z-]+' | sort -u; }

commands=$("$LASTGOOD_CLI" --help | sed -n '/^commands:/,/^$/s/^  \([a-z]*\) .*/\1/p')
common=$("$LASTGOOD_CLI" --help | sed -n '/^common options:/,/^$/p' | grep -oE -- '--[a-z-]+' | sort -u)
result 'the help names commands and common options' "$([ -n "$commands" ] && [ -n "$common" ] || echo 'none were found')"

missing=
for command in $commands; do
    [ -n "$(section "## lastgood $command")" ] || missing="$missing$command: no section \"## lastgood $command\"
"
done
result 'docs/cli.md has a section for each command' "$missing"

missing=
for command in $commands; do
    for option in $(options_of "$command"); do
        echo "$common" | grep -qxe "$option" && continue
        section "## lastgood $command" | grep -qE -- "^\| .*\`${option}[]=[\`]" || missing="$missing$command: $option
"
    done
done
for option in $common; do
    section '## Common options' | grep -qE -- "^\| .*\`${option}[]=[\`]" || missing="${missing}common: $option
"
done
result 'docs/cli.md has every option, in the section of its command' "$missing"

extra=
for command in $commands; do
    for option in $(section "## lastgood $command" | grep -oE -- '--[a-z][a-z-]+' | sort -u); do
        options_of "$command" | grep -qxe "$option" || extra="$extra$command: $option
"
    done
done
result 'docs/cli.md names no option that its command lacks' "$extra"

missing=
for status in $("$LASTGOOD_CLI" --help | sed -n '/^exit status:/,/^$/s/^  \([0-9]*\)  .*/\1/p'); do
    section '## Exit status' | grep -q "^| $status |" || missing="$missing$status
"
done
# shellcheck disable=SC2013 # numbers have no spaces
for number in $(sed -n 's/^ *CLI_[A-Z]* = \([0-9]*\).*/\1/p' "${LASTGOOD_SOURCE:-$here/../..}/cli/cli.h"); do
    section '## Exit status' | grep -q "^| $number |" || missing="$missing$number
"
done
result 'docs/cli.md explains every exit status' "$missing"

missing=
for command in $commands; do
    section "## lastgood $command" | grep -q "^\$ lastgood $command" || missing="$missing$command
"
done
result 'docs/cli.md shows what each command prints' "$missing"

missing=
for command in $commands; do
    [ "$command" = help ] || section "## lastgood $command" | grep -q '^JSON' || missing="$missing$command
"
done
result 'docs/cli.md describes the JSON of each command' "$missing"
echo "1..$n"
exit $bad
