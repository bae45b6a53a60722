#compdef millstream
# Completion of millstream in zsh. Load it after compinit with: eval "$(millstream completion zsh)"
_millstream() {
    local -a lines values
    local line files=0
    lines=("${(@f)$("${words[1]}" __complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    for line in "${lines[@]}"; do
        if [[ $line == :files ]]; then
            files=1
        elif [[ -n $line ]]; then
            values+=("${${line%%$'\t'*}//:/\\:}:${line#*$'\t'}")
        fi
    done
    ((${#values})) && _describe -V millstream values
    ((files)) && _files
}
if [[ $funcstack[1] == _millstream ]]; then
    _millstream "$@"
else
    compdef _millstream millstream
fi
