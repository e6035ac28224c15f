# Sourced by scripts that take arguments, before these are read: with --help or -h as the first of them, prints the
# comment at the script's head and ends.
# shellcheck shell=bash
if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    awk 'NR == 1 {next} !/^#/ {exit} {sub(/^# ?/, ""); print}' "${BASH_SOURCE[1]}"
    exit 0
fi
