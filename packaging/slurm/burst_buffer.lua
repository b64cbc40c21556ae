-- Slurm's burst buffer plugin (BurstBufferType=burst_buffer/lua): lies beside slurm.conf. Each function runs
-- `forebay slurm bb`, and returns its exit status and what it printed.

local settings = {
    -- The program, on the controller.
    forebay = "/usr/bin/forebay",
    -- A directory that the controller and all nodes see, and that only root or SlurmUser may write.
    exchange = "/var/spool/forebay/slurm",
    -- What the fast pools of all nodes have for scratch directories: `scontrol show burstbuffer` counts it down by
    -- the capacity= of #DW lines with pool=forebay.
    capacity = "1TiB",
    -- How long the nodes of a job may take for their epilogs.
    data_out_wait = "60s",
}

-- Lua 5.1 has it as a global.
local unpack = table.unpack or unpack

local function quoted(text)
    return "'" .. tostring(text):gsub("'", "'\\''") .. "'"
end

-- Returns the exit status of a call, and its output.
local function forebay(call, ...)
    local words = { quoted(settings.forebay), "slurm", "bb", call }
    for _, word in ipairs({ ... }) do
        words[#words + 1] = quoted(word)
    end
    -- The status is printed: close() returns it only since Lua 5.2.
    local pipe = io.popen(table.concat(words, " ") .. " 2>&1; printf '\\n%d' $?", "r")
    if not pipe then
        return 1, "forebay: no process can be started"
    end
    local output = pipe:read("*a") or ""
    pipe:close()
    local text, status = output:match("^(.*)\n(%d+)$")
    return tonumber(status) or 1, ((text or output):gsub("%s+$", ""))
end

local function result(call, status, text)
    if text ~= "" then
        slurm.log_info("burst_buffer.lua: %s: %s", call, text)
    end
    if status == 0 then
        return slurm.SUCCESS
    end
    return slurm.ERROR, text
end

-- Runs in slurmctld itself, at the submission.
function slurm_bb_job_process(job_script)
    return result("check", forebay("check", job_script))
end

-- Runs when slurmctld starts, and twice a minute.
function slurm_bb_pools()
    local status, text = forebay("pools", "--capacity", settings.capacity)
    -- A warning may stand before it.
    local pools = text:match("{.*}")
    if status == 0 and pools then
        return slurm.SUCCESS, pools
    end
    return result("pools", status, text)
end

function slurm_bb_setup()
    return slurm.SUCCESS
end

-- The job is pending, and has no nodes yet.
function slurm_bb_data_in(job_id, job_script)
    return result("data-in", forebay("data-in", "--exchange", settings.exchange, job_id, job_script))
end

-- Slurm 24.11 asks after data_in, and after data_out, whether what it began has ended; 22.05 does not ask. Both have
-- ended when they return: what is on a node is staged by its prolog.
function slurm_bb_test_data_in()
    return slurm.SUCCESS
end

function slurm_bb_real_size()
    return slurm.SUCCESS
end

-- Runs in slurmctld itself, before pre_run. The tasks of the job get this variable, and do not run on a node that has not
-- seen what the job asks for. It names the job, because jobs that this one submits inherit it.
function slurm_bb_paths(job_id, _, path_file)
    local file, why = io.open(path_file or "", "w")
    if not file then
        return result("paths", 1, "forebay: the environment of the job: " .. tostring(why))
    end
    file:write("FOREBAY_DIRECTIVES=", job_id, "\n")
    file:close()
    return slurm.SUCCESS
end

-- The job has nodes. They run their prologs when this has ended.
function slurm_bb_pre_run(job_id)
    return result("pre-run", forebay("pre-run", "--exchange", settings.exchange, job_id))
end

function slurm_bb_post_run()
    return slurm.SUCCESS
end

-- The job has ended. With Flags=TeardownFailure of burst_buffer.conf, a failure shows its reason as SystemComment, and
-- the job is torn down; without it, the job would stay in its stage-out for ever.
function slurm_bb_data_out(job_id)
    return result("data-out",
        forebay("data-out", "--exchange", settings.exchange, "--wait", settings.data_out_wait, job_id))
end

function slurm_bb_test_data_out()
    return slurm.SUCCESS
end

-- `hurry`: the job was cancelled by `scancel --hurry`, or before it ran.
function slurm_bb_job_teardown(job_id, _, hurry)
    local words = { "--exchange", settings.exchange, "--wait", settings.data_out_wait, job_id }
    if tostring(hurry) == "true" then
        words[#words + 1] = "--hurry"
    end
    return result("teardown", forebay("teardown", unpack(words)))
end

-- `scontrol show bbstat`, which every user may run: reasons name files of other users. `forebay slurm bb status` shows
-- them.
function slurm_bb_get_status()
    local _, text = forebay("status", "--no-reasons", "--exchange", settings.exchange)
    return slurm.SUCCESS, text .. "\n"
end

return {
    settings = settings,
    forebay = forebay,
}
