{{/* Names.  A release called "baton" is not called "baton-baton". */}}
{{- define "baton.name" -}}
{{- if contains "baton" .Release.Name -}}{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}{{ printf "%s-baton" .Release.Name | trunc 40 | trimSuffix "-" }}{{- end -}}
{{- end }}

{{- define "baton.selector" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "baton.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "baton.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (ternary (include "baton.name" .) "default" .Values.serviceAccount.create) }}
{{- end }}

{{- define "baton.secret" -}}
{{ .Values.auth.existingSecret | default (include "baton.name" .) }}
{{- end }}

{{/* What all pods have: nobody's root, nothing to write but /tmp and /cache, no token of Kubernetes. */}}
{{- define "baton.pod" -}}
serviceAccountName: {{ include "baton.serviceAccount" . }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{- define "baton.volumes" -}}
- name: tmp
  emptyDir: {}
- name: cache
  {{- with .Values.cacheVolume }}
  {{- toYaml . | nindent 2 }}
  {{- else }}
  emptyDir: {}
  {{- end }}
- name: secret
  secret:
    secretName: {{ include "baton.secret" . }}
    defaultMode: 0440
    items:
      - key: cluster-secret
        path: cluster-secret
{{- with .Values.modelVolume }}
- name: models
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "baton.container" -}}
image: {{ include "baton.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
volumeMounts:
  - name: tmp
    mountPath: /tmp
  - name: cache
    mountPath: /cache
  - name: secret
    mountPath: /run/baton
    readOnly: true
  {{- if .Values.modelVolume }}
  - name: models
    mountPath: /models
    readOnly: true
  {{- end }}
{{- end }}

{{- define "baton.env" -}}
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: BATON_CLUSTER_SECRET_FILE
  value: /run/baton/cluster-secret
- name: HF_HOME
  value: /cache/huggingface
- name: XDG_CACHE_HOME
  value: /cache
{{- with .Values.hubTokenSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: HF_TOKEN
{{- end }}
{{- end }}

{{/* The model and its flags, as list items. */}}
{{- define "baton.modelArgs" -}}
{{- with .Values.model }}
- {{ . | quote }}
{{- end }}
{{- range .Values.modelArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{/* Of one label: what `instances` says of it over what all have.  Takes {root, label}. */}}
{{- define "baton.ofLabel" -}}
{{- $given := index .root.Values.instances .label | default dict -}}
{{- mergeOverwrite (deepCopy .root.Values.instanceDefaults) (dict "replicas" 1) (deepCopy $given) | toYaml -}}
{{- end }}

{{- define "baton.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
