#!/bin/sh
# step.sh MESSAGE COMMAND [ARG ...]: say what is done, do it, say how long it took.
message=$1
shift
start=$(date +%s)
printf '==> %s\n' "$message"
"$@"
status=$?
seconds=$(($(date +%s) - start))
if [ "$status" -eq 0 ]; then
    printf '    done in %d s\n' "$seconds"
else
    printf '    FAILED with status %d after %d s\n' "$status" "$seconds" >&2
fi
exit "$status"
