# A program that knows nothing of tsg, for `tsg agent exec`: steady.sh FOLDER. It works until its gate is opened.
tell() {
    echo "$TSG_ATTEMPT $TSG_STEP $1 $(date +%s.%N)" >> "$folder/story"
}

folder=$1
tell begins
tries=0
until [ -e "$folder/gate-$TSG_STEP" ]; do
    tries=$((tries + 1))
    [ "$tries" -gt 900 ] && exit 5
    sleep 0.1
done
tell ends
