# An agent that uses the commands as the message tells them: flaky.sh FOLDER PYTHON [taken].
# The first delivery of a step does not reach it, and its first try fails.
tell() {
    echo "$TSG_ATTEMPT $TSG_STEP $1 $(date +%s.%N)" >> "$folder/story"
}

tsg() {
    "$python" -m tsg "$@"
}

folder=$1 python=$2 how=$3
tell launched
if [ "$how" != taken ]; then
    if mkdir "$folder/declined-$TSG_STEP" 2> /dev/null; then
        exit 3
    fi
    if ! tsg step start "$TSG_PLAN" "$TSG_STEP" --attempt "$TSG_ATTEMPT"; then
        tell refused
        exit 4
    fi
fi
tell begins
if mkdir "$folder/failed-$TSG_STEP" 2> /dev/null; then
    tell ends
    tsg step complete "$TSG_PLAN" "$TSG_STEP" failed --error 'not yet' && tell failed
    exit 0
fi
tries=0
until [ -e "$folder/gate-$TSG_STEP" ]; do
    tries=$((tries + 1))
    [ "$tries" -gt 900 ] && exit 5
    sleep 0.1
done
tell ends
tsg step complete "$TSG_PLAN" "$TSG_STEP" success --learning 'flaky did it' && tell succeeded
