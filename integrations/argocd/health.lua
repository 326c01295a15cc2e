-- Health of a FineTuneJob for Argo CD: Progressing until the job ends, Healthy if it is complete.
local health = {status = "Progressing", message = "the operator has not processed the job yet"}
local status = obj.status
if status == nil then
  return health
end
local observed = status.observedGeneration
local generation = obj.metadata.generation
if observed == nil or observed < 0 or (generation ~= nil and observed < generation) then
  return health
end

local conditions = {}
for _, condition in ipairs(status.conditions or {}) do
  if condition.status == "True" then
    conditions[condition.type] = condition
  end
end

local function describe(condition)
  if condition.message == nil or condition.message == "" then
    return condition.reason or ""
  end
  return (condition.reason or "") .. ": " .. condition.message
end

if conditions.Failed ~= nil then
  return {status = "Degraded", message = describe(conditions.Failed)}
end
if conditions.Complete ~= nil then
  return {status = "Healthy", message = describe(conditions.Complete)}
end
if conditions.Stalled ~= nil then -- the operator cannot reconcile the job
  return {status = "Degraded", message = describe(conditions.Stalled)}
end
if conditions.Suspended ~= nil then
  return {status = "Suspended", message = describe(conditions.Suspended)}
end
if conditions.Running ~= nil then
  local display = status.display or {}
  health.message = describe(conditions.Running)
  if display.progress ~= nil and display.progress ~= "" then
    health.message = display.progress .. "; " .. health.message
  end
elseif conditions.Reconciling ~= nil then
  health.message = describe(conditions.Reconciling)
end
return health
