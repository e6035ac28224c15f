# Prints what failed in the log of a tier, as scripts/count.awk counts it: the names, and the lines in
# which cargo's tests and pytest's, and commands at their end, say why.
/^-- / { count = 0 }
# A command that a tier runs as one check: its last lines are the reason.
/^FAILED \(exit code/ {
    for (i = count > 8 ? count - 8 : 0; i < count; i++) print last[i % 8]
}
/^test .* \.\.\. FAILED$/ || /^(FAILED|ERROR) / { print; next }
/^thread '.*' .*panicked at / { reason = 6 }
reason && NF { print; reason-- }
!NF { reason = 0 }
NF { last[count++ % 8] = $0 }
