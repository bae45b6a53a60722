# Completion of millstream in fish. Put it into ~/.config/fish/completions/millstream.fish
function __millstream_complete
    set -l before (commandline -opc)
    set -l current (commandline -ct)
    for line in (command millstream __complete $before[2..-1] "$current" 2>/dev/null)
        if test "$line" = ":files"
            __fish_complete_path "$current"
        else
            echo $line
        end
    end
end
complete -c millstream -f -a '(__millstream_complete)'
