# Completion of millstream in bash. Load it with: eval "$(millstream completion bash)"
_millstream() {
    local line files=0 current="${COMP_WORDS[COMP_CWORD]}"
    COMPREPLY=()
    while IFS= read -r line; do
        case $line in
            :files) files=1 ;;
            *) COMPREPLY+=("${line%%$'\t'*}") ;;
        esac
    done < <("$1" __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    if ((files)); then
        if ((${#COMPREPLY[@]} == 0)); then
            compopt -o filenames 2>/dev/null
        fi
        while IFS= read -r line; do
            COMPREPLY+=("$line")
        done < <(compgen -f -- "$current")
    fi
}
complete -F _millstream millstream
