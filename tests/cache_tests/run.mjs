// Runs the suite http-cache-tests against a cache, and prints the verdict on each test as JSON.
//   node run.mjs PACKAGE URL [TEST]
import path from 'node:path'
import { createRequire } from 'node:module'
import { pathToFileURL } from 'node:url'

const [suite, base, only] = process.argv.slice(2)
const load = file => import(pathToFileURL(path.join(suite, file)))
const { runTests, getResults } = await load('client/runner.mjs')
const { determineTestResult } = await load('lib/display.mjs')
const { default: groups } = await load('tests/index.mjs')
const fetch = createRequire(path.join(suite, 'package.json'))('node-fetch')

const tests = groups.flatMap(group => group.tests).filter(test => !test.browser_only)
const chosen = only ? [{ tests: tests.filter(test => test.id === only) }] : groups
if (only) chosen[0].tests.forEach(test => { test.dump = true })
await runTests(chosen, fetch, false, base)
const results = getResults()
const names = { '✅': 'pass', '⛔️': 'fail', '⚠️': 'fail', Y: 'pass', N: 'fail', '🔹': 'setup', '⁉️': 'harness', '⚪️': 'dependency', '↻': 'retry', '-': 'untested' }
const verdicts = tests.filter(test => !only || test.id === only).map(test => {
  const result = results[test.id]
  const verdict = names[determineTestResult(groups, test.id, results, !only)[2]]
  return { id: test.id, kind: test.kind || 'required', verdict, why: Array.isArray(result) ? result.join(': ') : '' }
})
console.log(JSON.stringify(verdicts))
