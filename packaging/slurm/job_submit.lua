-- Optional (JobSubmitPlugins=lua): lies beside slurm.conf. Jobs may write `#FB` for `#DW fb`, and leave out the pool=
-- that Slurm wants with each capacity= of a #DW line. A site with a job_submit.lua of its own calls `rewritten` from it.

local function rewritten(script)
    local lines, is_over = {}, false
    for line, ending in script:gmatch("([^\n]*)(\n?)") do
        is_over = is_over or (line ~= "" and line:sub(1, 1) ~= "#")
        if not is_over then
            line = line:gsub("^#FB(%s)", "#DW fb%1")
            if line:match("^#DW%s") and line:match("%scapacity=") and not line:match("%spool=") then
                line = line:gsub("(%s)(capacity=)", "%1pool=forebay %2", 1)
            end
        end
        lines[#lines + 1] = line .. ending
    end
    return table.concat(lines)
end

function slurm_job_submit(job_desc)
    local script = job_desc.script
    if script then
        local changed = rewritten(script)
        if changed ~= script then
            job_desc.script = changed
        end
    end
    return slurm.SUCCESS
end

function slurm_job_modify()
    return slurm.SUCCESS
end

return { rewritten = rewritten }
