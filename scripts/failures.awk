# Prints what failed in the log of a tier, as scripts/count.awk counts it: the names, and the lines in
# which cargo's tests and pytest's say why.
/^test .* \.\.\. FAILED$/ || /^(FAILED|ERROR) / { print; next }
/^thread '.*' .*panicked at / { reason = 6 }
reason && NF { print; reason-- }
!NF { reason = 0 }
