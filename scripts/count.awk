# Adds up the closing lines of cargo test, pytest and `check` (scripts/tiers/common.sh) in a log, to
# "passed failed skipped".
function add(word, number) {
    if (word ~ /^passed/) passed += number
    else if (word ~ /^(failed|errors?)/) failed += number
    else if (word ~ /^(ignored|skipped|xfailed|filtered)/) skipped += number
}
/^test result: / || /^=+ .* in [0-9.]+s.* =+$/ || /^check: / {
    for (i = 2; i <= NF; i++) if ($(i - 1) ~ /^[0-9]+$/) add($i, $(i - 1))
}
END { print passed + 0, failed + 0, skipped + 0 }
